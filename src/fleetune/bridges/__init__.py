"""Other people's words: h2oGPT's, xTuring's, Lightning's and H2O LLM Studio's, translated into those of fleetune."""
