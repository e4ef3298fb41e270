"""`rlsdk algorithms`: recipes, and the settings that they expand to."""

from __future__ import annotations

from rlsdk.cli.plugin_tools.listing import table
from rlsdk.config import load_config, needed_roles
from rlsdk.config.loading.recipes import recipe_names, recipe_summary, recipe_text
from rlsdk.registry import ComponentKind, Registry

PARTS = {
    "advantage": ComponentKind.ADVANTAGE,
    "loss": ComponentKind.LOSS,
    "loss_aggregation": ComponentKind.AGGREGATION,
}
"""Fields of `algorithm` that name a registered component."""


def list_recipes() -> None:
    """Prints every recipe with its summary."""
    print(table([("name", "what it is"), *((name, recipe_summary(name)) for name in recipe_names())]))
    print("\nrlsdk algorithms show NAME prints the settings of one; rlsdk train --algorithm NAME starts from it")


def show_recipe(name: str) -> None:
    """Prints the settings of a recipe, a description of its parts, and the roles of a run with it.

    Raises:
        ConfigError: there is no recipe of this name.
    """
    text = recipe_text(name)
    registry = Registry.discover()
    config = load_config([], ["--algorithm", name], registry)
    print(text)
    for field, kind in PARTS.items():
        chosen = getattr(config.algorithm, field)
        print(f"{field:<17} {chosen}: {description(registry, kind, chosen)}")
    print(f"{'roles':<17} {', '.join(needed_roles(config))}")
    print(f"\nrlsdk train --algorithm {name} ...; flags override any part: --algorithm.loss_options '{{...}}'")


def description(registry: Registry, kind: ComponentKind, name: str) -> str:
    """Returns the description of a registered component."""
    spec = registry.row(kind, name).spec
    return spec.description if spec is not None else ""
