//! bedplate-virtio
