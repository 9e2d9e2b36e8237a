//! bedplate-vhost-user
