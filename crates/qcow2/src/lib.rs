//! bedplate-qcow2
