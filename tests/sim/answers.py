"""What a coordinator has said, to whomever: none of it may ever be taken back."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.fleet.decisions import ClientGranted, Decision
from shoal.store.messages import PlacementInfo

from .ledger import Violation

Places = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]  # terms, chains


class Answers:
    """All that were heard in one run."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}  # of clients and tables, by name
        self._granted: set[tuple[str, int]] = set()
        self._placements: dict[int, Places] = {}  # by version
        self._chains: dict[tuple[int, int], tuple[int, ...]] = {}  # by shard and term

    def client(self, name: str, client_id: int, incarnation: int) -> None:
        self._id(name, client_id)
        if (name, incarnation) in self._granted:
            raise Violation(f"two lives of {name} are incarnation {incarnation}")
        self._granted.add((name, incarnation))

    def table(self, name: str, table_id: int) -> None:
        self._id(name, table_id)

    def _id(self, name: str, number: int) -> None:
        if self._ids.setdefault(name, number) != number:
            raise Violation(f"{name} has got the ids {self._ids[name]} and {number}")
        same = [other for other, its in self._ids.items() if its == number]
        if len(same) > 1:
            raise Violation(f"{', '.join(same)} have got the same id, {number}")

    def server(self, identity: str, index: int, expected: int) -> None:
        if index != expected:
            raise Violation(f"{identity} has got the place {index}")

    def placement(self, info: PlacementInfo, known: int) -> None:
        """Somebody who knew version `known` is told of this one."""
        if info.version < known:
            raise Violation(f"who knew placement {known} is told of placement {info.version}")
        places = (info.terms, info.chains)
        if info.version in self._placements:
            if self._placements[info.version] != places:
                raise Violation(f"there are two placements {info.version}")
            return
        self._placements[info.version] = places
        for version, (terms, _) in self._placements.items():
            older, newer = (terms, info.terms) if version < info.version else (info.terms, terms)
            if any(old > new for old, new in zip(older, newer, strict=True)):
                raise Violation(f"terms go back between placements {version} and {info.version}")
        for shard, (term, chain) in enumerate(zip(info.terms, info.chains, strict=True)):
            if self._chains.setdefault((shard, term), chain) != chain:
                raise Violation(
                    f"shard {shard} has two chains in term {term}: {self._chains[shard, term]} and {chain}"
                )

    def newer(self, name: str, incarnation: int, journal: Iterable[Decision]) -> bool:
        """Whether a later life of that name was decided on."""
        return any(
            isinstance(one, ClientGranted) and one.name == name and one.incarnation > incarnation
            for one in journal
        )
