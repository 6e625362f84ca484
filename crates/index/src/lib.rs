//! Which worker holds which prefix blocks. Exact: no block is ever skipped.
