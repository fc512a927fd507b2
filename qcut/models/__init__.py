"""Float models as torch modules: finding their linear layers and norms, measuring their quality on a text."""
