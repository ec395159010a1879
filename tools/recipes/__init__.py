"""Groups built from recipes (docs/recipes.md): read, rendered, run in an environment of this node, and packed as one layer."""
