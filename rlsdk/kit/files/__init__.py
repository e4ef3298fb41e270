"""Files that engines and runs read and write: models, atomic writes, and what a failed write says."""
