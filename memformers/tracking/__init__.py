"""The recorder of a run's metrics, and the relay that feeds labml and a dashboard from them."""
