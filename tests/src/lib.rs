//! bedplate-tests
