"""Optimizers, initialisers and placement as settings: torch's names, checked, and equal after the wire."""

import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

import shoal
from shoal import _core, init, optim
from shoal.errors import BadInput
from shoal.store.catalogue import decode_setting

OPTIMIZERS = [
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    optim.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    optim.Adagrad(lr_decay=0.1),
    optim.RowwiseAdagrad(lr=0.1),
    optim.Adam(betas=(0.8, 0.9)),
    optim.AdamW(),
    optim.FTRL(lr=0.1, l1=1, l2=2),
]
INITS = [
    init.Zeros(),
    init.Constant(-1),
    init.Uniform(0.1),
    init.Uniform(1, 2),
    init.Normal(0.1),
    init.Normal(5, 1),
]


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
def test_names_and_defaults_are_those_of_torch(name: str) -> None:
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    for parameter in inspect.signature(getattr(optim, name)).parameters.values():
        assert parameter.default == theirs[parameter.name].default
        by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert by_name == (parameter.name != "lr")


@pytest.mark.parametrize("kind", [optim.RowwiseAdagrad, optim.FTRL])
def test_lr_is_needed_where_torch_has_no_default(kind: type) -> None:
    with pytest.raises(TypeError, match="lr"):
        kind()


@pytest.mark.parametrize("kind", optim.KINDS.values())
def test_lr_may_be_given_by_position(kind: type[optim.Optimizer]) -> None:
    assert kind(0.25) == kind(lr=0.25)
    with pytest.raises(BadInput, match=r"lr is \[1\]"):
        kind([1])  # as one who gives torch's parameters


def test_an_optimizer_as_text_is_lr_and_what_is_not_its_default() -> None:
    assert str(optim.SGD(0.1, momentum=0.9, nesterov=True)) == "SGD(lr=0.1, momentum=0.9, nesterov=True)"
    assert str(optim.Adam()) == "Adam(lr=0.001)"
    assert str(optim.FTRL(1)) == "FTRL(lr=1.0)"


def test_the_page_of_optimizers_lists_their_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    listed = [
        set(re.findall(r"`(\w+)`", line)) for line in re.findall(r"^\| fields \| (.*)", page, re.MULTILINE)
    ]
    ours = [
        set(inspect.signature(kind).parameters) for kind in optim.KINDS.values() if kind is not optim.AdamW
    ]
    assert [names - {"beta1", "beta2"} for names in listed if names] == ours


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "x", None, True])
@pytest.mark.parametrize(
    "kind", [optim.SGD, optim.Adagrad, optim.RowwiseAdagrad, optim.Adam, optim.AdamW, optim.FTRL]
)
def test_a_bad_lr_is_refused_by_name(kind: type, value: float) -> None:
    with pytest.raises(BadInput, match=f"{kind.__name__}: lr is {value!r}"):
        kind(lr=value)


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9, ("a", "b")])
def test_bad_betas_are_refused(betas: object) -> None:
    with pytest.raises(BadInput, match="betas is"):
        optim.Adam(betas=betas)  # type: ignore[arg-type]


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(BadInput, match="nesterov needs a momentum"):
        optim.SGD(lr=0.1, nesterov=True)
    with pytest.raises(BadInput, match=r"dampening is 0\.1"):
        optim.SGD(lr=0.1, momentum=0.9, dampening=0.1, nesterov=True)
    with pytest.raises(BadInput, match="nesterov is 1"):
        optim.SGD(lr=0.1, momentum=0.9, nesterov=1)  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        optim.SGD(lr=0.1).lr = 0.2  # type: ignore[misc]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_the_core_takes_every_optimizer(optimizer: optim.Optimizer) -> None:
    spec = optimizer.to_core()
    _core.update.check(spec)
    assert spec.kind == optimizer.kind
    assert spec.lr == pytest.approx(optimizer.lr)


def test_the_core_gets_torchs_names_as_its_own() -> None:
    spec = optim.Adam(betas=(0.5, 0.25)).to_core()
    assert (spec.beta1, spec.beta2) == (0.5, 0.25)
    assert optim.Adagrad(initial_accumulator_value=0.5).to_core().initial == 0.5


@pytest.mark.parametrize("settings", INITS, ids=repr)
def test_the_core_takes_every_initialiser(settings: init.Initializer) -> None:
    spec = settings.to_core()
    _core.update.check(spec)
    assert spec.kind == settings.kind


@pytest.mark.parametrize("settings", [*OPTIMIZERS, *INITS], ids=repr)
def test_settings_are_equal_after_the_wire(settings: object) -> None:
    kind = optim.Optimizer if isinstance(settings, optim.Optimizer) else init.Initializer
    body = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(body, type=kind, dec_hook=decode_setting) == settings


@pytest.mark.parametrize(
    "plain",
    [{}, {"kind": "lion"}, {"kind": []}, {"kind": "sgd", "lr": -1}, {"kind": "sgd", "speed": 1}, [], None],
)
def test_other_settings_from_the_wire_are_refused(plain: object) -> None:
    body = msgspec.msgpack.encode(plain)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=optim.Optimizer, dec_hook=decode_setting)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=init.Initializer, dec_hook=decode_setting)


def test_short_forms_of_initialisers() -> None:
    assert init.Uniform(0.01) == init.Uniform(-0.01, 0.01)
    assert init.Normal(0.02) == init.Normal(0, 0.02) == init.Normal(std=0.02) == init.Normal(mean=0, std=0.02)
    assert init.Normal(1, std=0.5) == init.Normal(1, 0.5) == init.Normal(0.5, mean=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: init.Uniform(1, 1),
        lambda: init.Uniform(-0.1),
        lambda: init.Uniform(math.nan),
        lambda: init.Normal(),
        lambda: init.Normal(-1),
        lambda: init.Normal(1, 2, 3),
        lambda: init.Normal(mean=1),
        lambda: init.Constant(math.inf),
        lambda: init.Constant("a"),
        lambda: shoal.Range(5, 5),
        lambda: shoal.Range(0, 2**63),
        lambda: shoal.Range(0.5, 2),
    ],
)
def test_settings_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(BadInput):
        make()


def test_the_layout_is_what_adds_state_to_a_row() -> None:
    assert optim.SGD(lr=1).layout() != optim.SGD(lr=1, momentum=0.9).layout()
    assert optim.SGD(lr=1, momentum=0.9).layout() == optim.SGD(lr=2, momentum=0.5, nesterov=True).layout()
    assert optim.Adagrad().layout() != optim.Adagrad(lr_decay=0.1).layout()
    assert optim.Adam().layout() != optim.AdamW().layout()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (optim.SGD(), optim.SGD(weight_decay=0.1)),
        (optim.SGD(), optim.SGD(momentum=0.9)),
        (optim.SGD(momentum=0.9), optim.SGD(momentum=0.5, nesterov=True)),
        (optim.SGD(momentum=0.9), optim.SGD(momentum=0.9, dampening=0.5)),
        (optim.Adagrad(), optim.Adagrad(lr_decay=0.1)),
        (optim.Adagrad(), optim.Adagrad(weight_decay=0.1, eps=1e-3)),
    ],
)
def test_layouts_differ_where_the_core_keeps_other_state(
    one: optim.Optimizer, other: optim.Optimizer
) -> None:
    ours, theirs = (_core.update.state_floats(each.to_core(), 8) for each in (one, other))
    assert (one.layout() == other.layout()) == (ours == theirs)


def test_an_optimizer_of_ones_own_is_checked_as_the_one_it_is_made_of() -> None:
    @dataclass(frozen=True)
    class Warm(shoal.optim.Adam):
        warmup: float = 0.0

    assert Warm(lr=0.1, warmup=3.0).lr == 0.1
    with pytest.raises(BadInput, match="warmup is -1"):
        Warm(lr=0.1, warmup=-1)
