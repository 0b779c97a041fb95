"""Tools around the package that are not shipped with it."""
