class Serving:
    served_model_name: str | None
