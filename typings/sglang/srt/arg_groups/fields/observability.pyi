class Observability:
    extra_metric_labels: dict[str, str] | None
