class Device:
    watchdog_timeout: float | None
