//! bedplate-storage
