//! bedplate-nbd
