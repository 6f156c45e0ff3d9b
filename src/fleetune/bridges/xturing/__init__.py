"""xTuring's Python: `create_model`, `BaseModel`, data sets and configs, said as runs of fleetune."""
