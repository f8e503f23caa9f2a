"""What a coordinator that is started again still knows."""

from shoal.config import CoordinatorOptions
from shoal.fleet.coordinator import Coordinator, Outcome
from shoal.fleet.decisions import LOSSES_MAX, Decision, LossTold, decode, encode
from shoal.store import messages as m


class World:
    """A coordinator, its journal, and servers that ask it for news."""

    def __init__(self, servers: int, replicas: int = 0) -> None:
        self._options = CoordinatorOptions(servers=servers, shards=4, replicas=replicas)
        self._journal: dict[str, Decision] = {}
        self.restart()
        for index in range(servers):
            self.register(index)

    def restart(self, now: float = 0.0) -> None:
        self.coordinator = Coordinator(self._options, now=now)
        for decision in self._journal.values():
            self.coordinator.restore(decode(encode(decision)))
        self._keep(self.coordinator.begin())

    def _keep(self, outcome: Outcome) -> Outcome:
        for decision in outcome.decisions:
            self._journal.pop(decision.key, None)
            self._journal[decision.key] = decision
        return outcome

    def ask(self, peer: int, request: m.Request, now: float = 0.0) -> list[m.Reply]:
        replies = self._keep(self.coordinator.handle(peer, request, now)).replies
        return [said for to, said in replies if to == peer]

    def register(self, index: int) -> None:
        request = m.RegisterServer(
            identity=f"server-{index}", pid=1, host="x", port=1 + index, unix_path="", shards=4
        )
        self.ask(index, request)

    def watch(self, index: int, after: int, now: float = 0.0) -> m.PlacementInfo | None:
        """What a server is told at once, if anything."""
        request = m.WatchPlacement(after=after, wait_s=1.0, server=index, identity=f"server-{index}")
        said = self.ask(100 + index, request, now)
        return said[0].placement if said else None

    def tick(self, now: float) -> None:
        self._keep(self.coordinator.tick(now))

    def end_fill(self) -> None:
        fill = next(iter(self.coordinator._placer.fills.values()))
        self.ask(9, m.Filled(number=fill.number, shard=fill.shard, term=fill.term, target=fill.target))

    def lost(self) -> tuple[m.Lost, ...]:
        return self.ask(9, m.GetStatus())[0].lost


def test_who_answered_pulls_of_a_moved_shard_learns_of_it_first_also_from_the_next_coordinator() -> None:
    world = World(1)
    world.register(1)
    before = world.coordinator._placer.version
    world.end_fill()
    world.restart()
    world.register(0)
    world.register(1)
    assert world.watch(1, after=before) is None
    placement = world.watch(0, after=before)
    assert placement is not None
    assert world.watch(1, after=before) is None  # it was told, and perhaps did not hear
    world.watch(0, after=placement.version)
    assert world.watch(1, after=before) == placement


def test_nobody_waits_for_a_server_that_was_given_up_before() -> None:
    world = World(3, replicas=1)
    world.ask(9, m.RemoveServer(index=2))
    before = world.coordinator._placer.version
    world.end_fill()
    gone = next(iter(world.coordinator._placer.first_to_know))
    world.ask(9, m.EvictServer(index=gone, why="it ended"))
    world.restart()
    first = world.coordinator._placer.first_to_know
    assert gone not in first
    told = [index for index in {0, 1, 2} - {gone} if world.watch(index, after=before) is not None]
    assert told


TOOK = m.Takeover(shard=3, term=2, version=120, entry=130)
LOST = m.Lost(client=7, shard=3, term=2, version=120, last=180, pushes=4)


def test_clients_that_were_not_told_of_a_takeover_hear_it_from_the_next_coordinator() -> None:
    world = World(1)
    told = m.WatchPlacement(after=1, wait_s=1.0, server=0, identity="server-0", takeovers=(TOOK,))
    world.ask(100, told)
    world.restart()
    world.register(0)
    ((news,),) = [world.ask(50, m.WatchPlacement(after=9, wait_s=1.0))]
    assert (news.takeovers, news.heard) == ((TOOK,), 1)
    world.ask(100, told)  # as with each placement
    assert world.ask(50, m.WatchPlacement(after=9, wait_s=1.0, heard=1, lost=(LOST,))) == []
    assert [one.pushes for one in world.lost()] == [4]
    world.restart()
    assert [(one.shard, one.last, one.pushes) for one in world.lost()] == [(3, 180, 4)]


def test_the_journal_keeps_as_many_losses_as_are_known() -> None:
    world = World(1)
    takeovers = tuple(m.Takeover(shard=0, term=term, version=1, entry=1) for term in range(2, 5003))
    lost = tuple(
        m.Lost(client=client, shard=0, term=2, version=1, last=2, pushes=1) for client in range(5000)
    )
    world.ask(100, m.WatchPlacement(after=1, wait_s=1.0, takeovers=takeovers, lost=lost, heard=5001))
    (before,) = world.lost()
    world.restart()
    assert world.lost() == (before,)
    assert len(world._journal) < 2 * 4096 + 20
    (news,) = world.ask(50, m.WatchPlacement(after=9, wait_s=1.0, heard=5000))
    assert news.takeovers == takeovers[-1:]


def tell(world: World, *losses: m.Lost) -> None:
    world.ask(100, m.WatchPlacement(after=1, wait_s=1.0, lost=losses, heard=5001))


def totals(world: World) -> tuple[int, int]:
    """Updates and pushes of all shards."""
    found = world.lost()
    return sum(one.last - one.version for one in found), sum(one.pushes for one in found)


def test_what_was_lost_longer_ago_than_is_known_one_by_one_still_counts() -> None:
    world = World(1)
    for term in (2, 3, 4):
        for shard in (0, 1):
            tell(
                world,
                *(
                    m.Lost(client=client, shard=shard, term=term, version=1, last=2 + client % 7, pushes=2)
                    for client in range(1000)
                ),
            )
    assert totals(world) == (6 * 7, 12_000)
    assert len(world.lost()) == 6
    tell(world, *(m.Lost(client=c, shard=2, term=9, version=1, last=3, pushes=1) for c in range(5000)))
    assert totals(world) == (6 * 7 + 2, 17_000)
    assert [(one.shard, one.term, one.pushes) for one in world.lost()] == [
        *((shard, term, pushes) for shard in (0, 1) for term, pushes in ((0, 4000), (4, 2000))),
        (2, 9, 5000),
    ]
    before = world.lost()
    world.restart()
    assert world.lost() == before
    tell(world, m.Lost(client=4999, shard=2, term=9, version=1, last=3, pushes=1))  # not answered before
    assert world.lost() == before


def test_a_loss_counts_once_if_the_journal_ends_between_it_and_the_one_that_takes_its_place() -> None:
    world = World(1)
    tell(world, *(m.Lost(client=c, shard=0, term=2, version=1, last=3, pushes=1) for c in range(4097)))
    newest = f"loss/{4097 % LOSSES_MAX}"
    first = LossTold(number=1, lost=m.Lost(client=0, shard=0, term=2, version=1, last=3, pushes=1))
    assert newest == first.key
    journal = {newest: first, **{key: one for key, one in world._journal.items() if key != newest}}
    world._journal = journal
    world.restart()
    assert totals(world) == (2, 4096)
