"""h2oGPT's `finetune.py`: its flags and prompt types, said as a run of fleetune."""
