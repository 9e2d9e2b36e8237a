//! bedplate-image
