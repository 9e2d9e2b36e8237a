//! bedplate-disk
