"""What may become of saved tensors, and a rule that says so.

Covers: ``Save``, ``Offload``, ``Recompute``, the words that stand for them, and what each looks like in a file.
Does not cover: which modules a rule is about (globs.py, resolving.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from backhaul.globs import pattern
from backhaul.tiers.base import Tier


@dataclass(frozen=True)
class Save:
    """Keep saved tensors on the device."""

    word: ClassVar[str] = "save"

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Offload:
    """Move saved tensors to a tier: ``"host"``, ``"disk"``, a ``Tier``, or ``None`` for the one that the handle has."""

    tier: str | Tier | None = None

    word: ClassVar[str] = "offload"

    def __post_init__(self) -> None:
        if not (self.tier in (None, "host", "disk") or isinstance(self.tier, Tier)):
            raise ValueError(f'tier={self.tier!r} is unknown; use "host", "disk" or a backhaul.Tier')

    def __str__(self) -> str:
        tier = self.tier.name if isinstance(self.tier, Tier) else self.tier
        return f"{self.word} to {tier}" if tier else self.word


@dataclass(frozen=True)
class Recompute:
    """Run the module again when what it saved, or what it returned, is needed.

    Args:
        keep_outputs: globs over the names of modules inside; what those return is saved and not computed twice. For choices that must come
            out the same, such as a router's.
    """

    keep_outputs: tuple[str, ...] = ()

    word: ClassVar[str] = "recompute"

    def __post_init__(self) -> None:
        globs = self.keep_outputs
        if not isinstance(globs, (tuple, list)) or not all(isinstance(glob, str) for glob in globs):
            raise ValueError(f'keep_outputs={globs!r} is no tuple of globs; write keep_outputs=("*.gate",)')
        for glob in globs:
            pattern(glob)
        object.__setattr__(self, "keep_outputs", tuple(globs))

    def __str__(self) -> str:
        return f"{self.word}, keeping {', '.join(self.keep_outputs)}" if self.keep_outputs else self.word


Action: TypeAlias = Save | Offload | Recompute

_KINDS: dict[str, type[Action]] = {kind.word: kind for kind in (Save, Offload, Recompute)}


@dataclass(frozen=True)
class Rule:
    """One line of a plan."""

    glob: str
    action: Action
    num_bytes: int | None = None  # of the saved tensors that fall under it in one frame, if somebody has measured


def action_of(action: object, *, what: str) -> Action:
    """Return an action, or the one that a word stands for; ``what`` names it in the error."""
    if isinstance(action, (Save, Offload, Recompute)):
        return action
    if not isinstance(action, str) or action not in _KINDS:
        raise ValueError(
            f'{what} has the unknown action {action!r}; use "save", "offload", "recompute", bh.Save(), bh.Offload(...) or bh.Recompute(...)'
        )
    return _KINDS[action]()


def to_fields(action: Action, *, what: str) -> dict[str, Any]:
    """Return what stands for ``action`` in a file."""
    fields: dict[str, Any] = {"action": action.word}
    if isinstance(action, Offload) and action.tier is not None:
        if isinstance(action.tier, Tier):
            raise ValueError(
                f'{what} offloads to a {type(action.tier).__name__} object, which a file cannot hold; write tier="host" or tier="disk" '
                "there, or leave it out and give the object to bh.apply(tier=...)"
            )
        fields["tier"] = action.tier
    if isinstance(action, Recompute) and action.keep_outputs:
        fields["keep_outputs"] = list(action.keep_outputs)
    return fields


def from_fields(fields: Mapping[str, Any], *, what: str) -> Action:
    """Return the action that a file describes."""
    word = action_of(fields.get("action"), what=what).word
    options = {name: value for name, value in fields.items() if name != "action"}
    allowed = {"save": None, "offload": "tier", "recompute": "keep_outputs"}[word]
    for name in options:
        if name != allowed:
            knows = f"it knows {allowed!r}" if allowed else "it has none"
            raise ValueError(f"{what} gives {word!r} the option {name!r}; {knows}")
    try:
        return _KINDS[word](**options)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
