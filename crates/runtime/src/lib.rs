//! bedplate-runtime
