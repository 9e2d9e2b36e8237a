//! The control thread: waits for a front end, serves it until it goes, and waits for the next.
//!
//! The codec of the crate `vhost` leaves some bad messages without any answer, so that a front end would wait for
//! ever. Each message's header is looked at before the codec takes it, and where the codec has said nothing the
//! refusal is sent here. A front end that can't be told that its message failed is disconnected.

use crate::export::Control;
use crate::handler::Handler;
use crate::listener::Listener;
use crate::session::Session;
use bedplate_storage::Storage;
use bedplate_virtio::vanish::Alarm;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};
use vhost::vhost_user::{BackendReqHandler, Error};

const HEADER: usize = 12;
const CONFIG_BODY: usize = 12;
const MAX_MESSAGE: u32 = 4096;
const FLAG_VERSION: u32 = 1;
const FLAG_VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message's header, and what follows of its first bytes.
struct Peeked {
    code: u32,
    flags: u32,
    size: u32,
    body: [u8; CONFIG_BODY],
}

/// Looks at the next message without taking it. None when the front end has gone.
fn peek(stream: &UnixStream) -> Option<Peeked> {
    let mut b = [0_u8; HEADER + CONFIG_BODY];
    loop {
        // What has not come yet reads as zeroes: it only matters for refusals, and then ends the connection.
        match rustix::net::recv(stream.as_fd(), &mut b, RecvFlags::PEEK) {
            Err(rustix::io::Errno::INTR) => {}
            Ok((n, _)) if n > 0 => break,
            _ => return None,
        }
    }
    let word = |i: usize| u32::from_ne_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
    let mut body = [0; CONFIG_BODY];
    body.copy_from_slice(&b[HEADER..]);
    Some(Peeked { code: word(0), flags: word(4), size: word(8), body })
}

impl Peeked {
    fn is(&self, code: FrontendReq) -> bool {
        self.code == u32::from(code)
    }

    fn is_valid(&self) -> bool {
        self.flags & FLAG_VERSION_MASK == FLAG_VERSION
            && self.flags & FLAG_REPLY == 0
            && self.size <= MAX_MESSAGE
            && FrontendReq::try_from(self.code).is_ok()
    }

    /// Sends an answer to this message.
    fn reply(&self, stream: &UnixStream, body: &[u8]) -> bool {
        let mut b = Vec::with_capacity(HEADER + body.len());
        b.extend(self.code.to_ne_bytes());
        b.extend((FLAG_VERSION | FLAG_REPLY).to_ne_bytes());
        b.extend((body.len() as u32).to_ne_bytes());
        b.extend(body);
        let sent = rustix::net::send(stream.as_fd(), &b, SendFlags::NOSIGNAL);
        sent.is_ok_and(|n| n == b.len())
    }
}

/// Deals with a message that the codec or the session refused. False when the connection can't go on.
fn refused(p: &Peeked, called: bool, acks: bool, stream: &UnixStream, error: &Error) -> bool {
    match error {
        Error::Disconnected
        | Error::PartialMessage
        | Error::SocketError(_)
        | Error::SocketBroken(_)
        | Error::SocketRetry(_)
        | Error::OversizedMsg => return false,
        _ => {}
    }
    if !p.is_valid() {
        return false;
    }
    if p.is(FrontendReq::GET_CONFIG) && !called {
        // The protocol's way to refuse it: the same place with a length of zero.
        let mut body = p.body;
        body[4..8].fill(0);
        return p.reply(stream, &body);
    }
    if p.flags & FLAG_NEED_REPLY == 0 || !acks {
        return false;
    }
    // These are acknowledged by the codec whether or not they reached the session.
    let by_codec = [
        FrontendReq::SET_MEM_TABLE,
        FrontendReq::SET_CONFIG,
        FrontendReq::SET_BACKEND_REQ_FD,
        FrontendReq::GPU_SET_SOCKET,
    ];
    let has_own_reply = [
        FrontendReq::GET_FEATURES,
        FrontendReq::GET_VRING_BASE,
        FrontendReq::GET_PROTOCOL_FEATURES,
        FrontendReq::GET_QUEUE_NUM,
        FrontendReq::GET_MAX_MEM_SLOTS,
        FrontendReq::GET_INFLIGHT_FD,
        FrontendReq::GET_SHARED_OBJECT,
        FrontendReq::GET_SHMEM_CONFIG,
    ];
    if has_own_reply.iter().any(|c| p.is(*c)) {
        return false;
    }
    called || by_codec.iter().any(|c| p.is(*c)) || p.reply(stream, &1_u64.to_ne_bytes())
}

/// Waits for a message. False when the front end has taken memory away that its queues use.
fn wait(stream: &UnixStream, alarm: &Alarm) -> bool {
    let mut fds =
        [stream.as_fd(), alarm.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => {}
            // Whoever reads next waits as well, or finds the connection broken.
            Ok(_) | Err(_) => return !alarm.rang(),
        }
    }
}

/// Serves one front end until it goes.
fn serve_one<S: Storage>(stream: UnixStream, handler: &Arc<Mutex<Handler<S>>>) {
    let start = || -> bedplate_types::Result<_> {
        let stream = stream.try_clone();
        let stream = stream.map_err(|e| {
            bedplate_types::Error::io("cannot share the connection's descriptor", e)
        })?;
        Ok((stream, Alarm::new()?))
    };
    let (codec_stream, alarm) = match start() {
        Ok(both) => both,
        Err(e) => return tracing::warn!("cannot serve a front end: {e:#}"),
    };
    let mut codec = BackendReqHandler::from_stream(codec_stream, handler.clone());
    let lock = || handler.lock().unwrap_or_else(PoisonError::into_inner);
    lock().session.begin(alarm.clone());
    loop {
        if !wait(&stream, &alarm) {
            let name = lock().session.shared().name.clone();
            tracing::error!(
                "{name}: the front end is disconnected, since guest memory that it had shared is gone: its file was made \
                 shorter, or the system has no memory for it; requests under way may have failed, other exports go on"
            );
            break;
        }
        let Some(message) = peek(&stream) else { break };
        lock().called = false;
        let Err(error) = codec.handle_request() else { continue };
        let (called, protocol, name) = {
            let h = lock();
            (h.called, h.session.protocol, h.session.shared().name.clone())
        };
        if matches!(error, Error::Disconnected) {
            break;
        }
        tracing::warn!("{name}: message {} of the front end failed: {error}", message.code);
        let acks = protocol & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0;
        if !refused(&message, called, acks, &stream, &error) {
            tracing::warn!("{name}: the front end is disconnected, since it can't be told");
            break;
        }
    }
}

/// The control thread.
pub(crate) fn run<S: Storage>(listener: Listener, control: &Control, session: Session<S>) {
    let name = session.shared().name.clone();
    let handler = Arc::new(Mutex::new(Handler { session, called: false }));
    loop {
        let stream = match listener.accept(&control.stop) {
            Ok(Some(stream)) => stream,
            Ok(None) => break,
            Err(e) => {
                // Too many open files, perhaps: others of this process may close some.
                tracing::error!("{name}: cannot accept a front end: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        tracing::info!("{name}: a front end has connected");
        if control.begin(&stream) {
            serve_one(stream, &handler);
        }
        control.end();
        handler.lock().unwrap_or_else(PoisonError::into_inner).session.end();
        tracing::info!("{name}: the front end has gone");
    }
}
