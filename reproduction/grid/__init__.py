"""The grid: settings, cells, engines that run cells, and results on disk."""
