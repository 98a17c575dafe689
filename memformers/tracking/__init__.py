"""The recorder of a run's metrics, and the relay that sends them to labml and a dashboard."""
