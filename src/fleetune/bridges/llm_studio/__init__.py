"""H2O LLM Studio: its experiment config (cfg.yaml) and its tables with parent chains, read as a run, and written from one."""
