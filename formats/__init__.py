"""Files that golden/ and export/ both read or write: Hugging Face checkpoints and model files. Needs numpy alone."""
