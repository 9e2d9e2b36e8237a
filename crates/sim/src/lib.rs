//! bedplate-sim
