//! bedplate-server
