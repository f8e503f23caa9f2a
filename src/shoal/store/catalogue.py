"""The catalogue: which tables and tensors exist, with which settings. Pure: no I/O, no clock.

The one implementation behind both kinds of address: an embedded client holds one, and so does the
coordinator, which journals what it decides. Opening is create-or-open:

1. the name is free: the request must be complete, the entry is created with the next id;
2. the name is taken: what the request says must agree (dim, shape, optimizer layout, init, seed,
   placement); what it leaves out is taken as it is; other hyper-parameters than those that exist replace
   them, and the generation grows;
3. a tensor's first value is written by exactly one opener at a time (`Opened.write`), the first to bring
   one; if it goes away before it says `written`, the next one takes over.

Ids and generations only grow and are never reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from shoal import init as init_
from shoal import optim
from shoal.config import check_name
from shoal.errors import BadInput, Mismatch, Refused, UnknownTable
from shoal.placement import Range
from shoal.settings import from_plain

if TYPE_CHECKING:
    from shoal.store.client import Session

DIM_MAX = 4096
ELEMENTS_MAX = 1 << 34
ENTRIES_MAX = 65536
_NAMES_SHOWN = 20

# Who writes a tensor's first value: nobody (there is one), this opener, this opener over what another one
# may have left half written, or another one, to be waited for.
Write: TypeAlias = Literal["none", "first", "again", "wait"]


class TableRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What an opener says of a table or tensor. None = no opinion."""

    name: str
    dense: bool = False
    dim: int | None = None
    shape: tuple[int, ...] | None = None
    optimizer: optim.Optimizer | None = None
    init: init_.Initializer | None = None
    init_if_new: init_.Initializer | None = None  # of one that is made, where `init` says nothing
    seed: int | None = None
    placement: Range | None = None
    brings_value: bool = False
    retune: bool = True  # hyper-parameters that differ from what exists take their place


class TableEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One table, or one dense tensor where `shape` is given."""

    id: int
    name: str
    generation: int
    dim: int
    shape: tuple[int, ...] | None
    optimizer: optim.Optimizer
    init: init_.Initializer
    seed: int
    placement: Range | None
    written: bool = True

    @property
    def what(self) -> str:
        return describe(self.name, self.shape is not None)

    @property
    def is_own(self) -> bool:
        """Whether it is one by which workers talk: nothing of the user's is in it."""
        return self.name.startswith("shoal.")


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request; `changed` says that the entry is new or has other hyper-parameters now."""

    entry: TableEntry
    changed: bool = False
    write: Write = "none"


class Directory(Protocol):
    """Where a client opens its tables: in itself, or at a coordinator."""

    def open(self, request: TableRequest, timeout_s: float) -> Opened:
        """Create or open; raises Mismatch, UnknownTable or BadInput."""
        ...

    def written(self, name: str, timeout_s: float) -> None:
        """The first value of the tensor `name` is in place."""
        ...

    def entries(self, timeout_s: float) -> list[TableEntry]:
        """All tables and tensors, in order of creation."""
        ...

    def rejoin(self, session: Session) -> None:
        """Give an evicted client's session its next life; raises Fenced where another client has that."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Catalogue:
    """Entries by name, in order of creation."""

    def __init__(self, entries: Iterable[TableEntry] = ()) -> None:
        self._entries: dict[str, TableEntry] = {}
        self._writers: dict[str, int] = {}
        self._taken_over: set[str] = set()
        for entry in entries:
            self.restore(entry)

    def __iter__(self) -> Iterator[TableEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> TableEntry | None:
        """The entry of that name, if there is one."""
        return self._entries.get(name)

    def restore(self, entry: TableEntry) -> None:
        """Take over what was decided in an earlier life; its writers are not known any more."""
        self._entries[entry.name] = entry
        if not entry.written:
            self._taken_over.add(entry.name)

    def open(self, request: TableRequest, opener: int = 0) -> Opened:
        """Create or open for `opener`, any number that names a connection."""
        old = self._entries.get(request.name)
        _check_request(request)
        entry = self._create(request) if old is None else _agree(old, request)
        self._entries[entry.name] = entry
        return Opened(entry=entry, changed=entry is not old, write=self._writer(entry, request, opener))

    def written(self, name: str) -> TableEntry | None:
        """Record that a tensor has its first value. Returns the changed entry, if it changed."""
        entry = self._entries.get(name)
        self._writers.pop(name, None)
        if entry is None or entry.written:
            return None
        self._entries[name] = entry = msgspec.structs.replace(entry, written=True)
        return entry

    def opener_gone(self, opener: int) -> None:
        """A connection ended: first values that it was to write fall to the next opener."""
        for name in [name for name, writer in self._writers.items() if writer == opener]:
            del self._writers[name]
            self._taken_over.add(name)

    def _create(self, request: TableRequest) -> TableEntry:
        if request.dim is None and not request.brings_value and request.optimizer is None:
            raise UnknownTable(self._unknown(request))
        missing = _missing(request)
        if missing:
            raise BadInput(f"creating {_what(request)} needs {' and '.join(missing)}")
        if len(self._entries) >= ENTRIES_MAX:
            raise Refused(f"no room for {_what(request)}: there are {ENTRIES_MAX} tables and tensors already")
        assert request.optimizer is not None
        shape = request.shape if request.dense else None
        return TableEntry(
            id=1 + max((entry.id for entry in self), default=0),
            name=request.name,
            generation=1,
            dim=math.prod(shape) if shape is not None else request.dim or 0,
            shape=shape,
            optimizer=request.optimizer,
            init=request.init or request.init_if_new or init_.Zeros(),
            seed=request.seed or 0,
            placement=request.placement,
            written=not request.dense,
        )

    def _writer(self, entry: TableEntry, request: TableRequest, opener: int) -> Write:
        if entry.written:
            return "none"
        if not request.brings_value or self._writers.get(entry.name, opener) != opener:
            return "wait"
        self._writers[entry.name] = opener
        return "again" if entry.name in self._taken_over else "first"

    def _unknown(self, request: TableRequest) -> str:
        names = sorted(entry.name for entry in self if (entry.shape is not None) == request.dense)
        kind = "tensor" if request.dense else "table"
        how = "value=..., optimizer=..." if request.dense else "dim=..., optimizer=..."
        shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN]) or "none yet"
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        call = f"client.{kind}({request.name!r}, {how})"
        return f"there is no {kind} {request.name!r}; {kind}s: {shown}{more}. To create it: {call}"


def describe(name: str, dense: bool) -> str:
    """How messages name it."""
    return f"{'tensor' if dense else 'table'} {name!r}"


def _what(request: TableRequest) -> str:
    return describe(request.name, request.dense)


def _missing(request: TableRequest) -> list[str]:
    needs: dict[str, Any] = {"optimizer=": request.optimizer}
    needs = {"value=": request.shape, **needs} if request.dense else {"dim=": request.dim, **needs}
    return [name for name, value in needs.items() if value is None]


def _check_request(request: TableRequest) -> None:
    check_name("name", request.name)
    if request.dim is not None and not 1 <= request.dim <= DIM_MAX:
        raise BadInput(f"{_what(request)}: dim is {request.dim}; allowed: 1 to {DIM_MAX}")
    if request.seed is not None and not 0 <= request.seed < 1 << 64:
        raise BadInput(f"{_what(request)}: seed is {request.seed}; allowed: 0 to 2**64 - 1")
    shape = request.shape
    if shape is not None and not (all(n >= 0 for n in shape) and 1 <= math.prod(shape) <= ELEMENTS_MAX):
        raise BadInput(f"{_what(request)}: shape is {shape}; it must hold 1 to {ELEMENTS_MAX} elements")


def _agree(entry: TableEntry, request: TableRequest) -> TableEntry:
    """The entry with the request's hyper-parameters, or Mismatch with all that differs."""
    if (entry.shape is not None) != request.dense:
        kind = "tensor" if request.dense else "table"
        raise Mismatch(f"{entry.what} exists, and was asked for as a {kind}; choose another name")
    asked_layout = None if request.optimizer is None else request.optimizer.layout()
    same_layout = asked_layout == entry.optimizer.layout()
    compared: list[tuple[str, object, object]] = [
        ("dim", entry.dim, None if request.dense else request.dim),
        ("shape", entry.shape, request.shape),
        ("optimizer", entry.optimizer, None if same_layout else request.optimizer),
        ("init", entry.init, request.init),
        ("seed", entry.seed, request.seed),
        ("placement", entry.placement or "by hash", request.placement),
    ]
    differences = [
        f"{name} is {there}, asked for {asked}"
        for name, there, asked in compared
        if asked is not None and asked != there
    ]
    if differences:
        raise Mismatch(
            f"{entry.what} exists with other settings: {'; '.join(differences)}. "
            f"Open it by name alone to take what exists, or choose another name"
        )
    if request.optimizer is None or request.optimizer == entry.optimizer or not request.retune:
        return entry
    return msgspec.structs.replace(entry, optimizer=request.optimizer, generation=entry.generation + 1)


def decode_setting(kind: type, value: Any) -> Any:
    """The `dec_hook` with which msgspec reads optimizers and initialisers."""
    if not isinstance(value, dict):
        raise BadInput(f"{kind.__name__} is {type(value).__name__}, expected a map")
    if kind is optim.Optimizer:
        return from_plain("optimizer", optim.KINDS, value)
    if kind is init_.Initializer:
        return from_plain("initialiser", init_.KINDS, value)
    raise NotImplementedError(kind)
