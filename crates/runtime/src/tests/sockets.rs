//! Sockets, event counters and waits for descriptors.

use super::*;
use crate::net::{Listener, Stream};
use crate::{EventFd, readable, spawn, timeout, writable, yield_now};
use std::io::{ErrorKind, IoSlice};
use std::net::Shutdown;
use std::rc::Rc;

const BIG: usize = 3 << 20;

async fn echo(stream: Stream) {
    let mut buf = vec![0; 70_000];
    loop {
        let n = stream.read(&mut buf).await.expect("read");
        if n == 0 {
            break;
        }
        stream.write_all(&buf[..n]).await.expect("write");
    }
    stream.shutdown(Shutdown::Both).expect("shutdown");
}

/// Sends much more than the sockets' buffers hold while reading it back.
async fn talk(stream: Stream) {
    let stream = Rc::new(stream);
    let data = pattern(BIG, 5).iovec();
    let expected = bytes_of(&data);
    let writer = stream.clone();
    let send = async {
        writer.write_all_from(&[], &data.slice(0, BIG / 2)).await.expect("write");
        let bytes = bytes_of(&data.slice(BIG / 2, BIG));
        let (a, b) = bytes.split_at(1000);
        let mut list = [IoSlice::new(&[]), IoSlice::new(a), IoSlice::new(b)];
        writer.write_all_vectored(&mut list).await.expect("write");
        writer.write_all_from(b"tail", &IoVec::default()).await.expect("write");
        writer.shutdown(Shutdown::Write).expect("shutdown");
    };
    let receive = async {
        let mut half = vec![0; BIG / 2];
        stream.read_exact(&mut half).await.expect("read");
        assert!(half == expected[..BIG / 2]);
        let rest = SharedBuf::zeroed(BIG - BIG / 2).expect("memory").iovec();
        let (a, b) = (rest.slice(0, 777), rest.slice(777, BIG));
        stream.read_exact_into(&a).await.expect("read");
        stream.read_exact_into(&b).await.expect("read");
        assert!(bytes_of(&rest) == expected[BIG / 2..]);
        let mut tail = [0; 4];
        stream.read_exact(&mut tail).await.expect("read");
        assert_eq!(&tail, b"tail");
        let e = stream.read_exact(&mut tail).await.expect_err("end");
        assert_eq!(e.kind(), ErrorKind::UnexpectedEof);
    };
    futures_util::future::join(send, receive).await;
}

#[test]
fn streams_echo_more_than_their_buffers_hold_over_unix_and_tcp_sockets() {
    on_both(&tiny(), |rt| {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("socket");
        rt.block_on(async {
            let listener = Listener::unix(&path).expect("listen");
            spawn(async move { echo(listener.accept().await.expect("accept")).await });
            talk(Stream::connect_unix(&path).await.expect("connect")).await;

            let listener = Listener::tcp("127.0.0.1:0".parse().expect("address")).expect("listen");
            let addr = listener.tcp_addr().expect("address");
            spawn(async move { echo(listener.accept().await.expect("accept")).await });
            talk(Stream::connect_tcp(addr).await.expect("connect")).await;
        });
    });
}

#[test]
fn a_closed_peer_is_an_error_and_not_a_signal() {
    on_both(&Config::default(), |rt| {
        rt.block_on(async {
            let (a, b) = Stream::pair().expect("pair");
            drop(b);
            let e = a.write_all(b"x").await.expect_err("no reader");
            assert_eq!(e.kind(), ErrorKind::BrokenPipe);
            let e = a.write_all_from(b"x", &pattern(9, 9).iovec()).await.expect_err("no reader");
            assert_eq!(e.kind(), ErrorKind::BrokenPipe);
            let e = a.read_exact_into(&pattern(9, 9).iovec()).await.expect_err("no writer");
            assert_eq!(e.kind(), ErrorKind::UnexpectedEof);
        });
    });
}

#[test]
fn shutting_a_stream_down_wakes_its_reader() {
    on_both(&Config::default(), |rt| {
        rt.block_on(async {
            let (a, _b) = Stream::pair().expect("pair");
            let a = Rc::new(a);
            let reader = a.clone();
            let stop = async {
                yield_now().await; // the reader waits by now
                a.shutdown(Shutdown::Both).expect("shutdown");
            };
            let mut buf = [0; 8];
            let (n, ()) = futures_util::future::join(reader.read(&mut buf), stop).await;
            assert_eq!(n.expect("read"), 0);
        });
    });
}

#[test]
fn event_counters_add_up_and_are_waited_for() {
    on_both(&Config::default(), |rt| {
        let event = Arc::new(EventFd::new().expect("eventfd"));
        rt.block_on(async {
            event.write().expect("write");
            event.write().expect("write");
            assert_eq!(event.wait().await.expect("wait"), 2);
            assert_eq!(event.try_take().expect("take"), None);
            writable(&*event).await.expect("there is room in the counter");
            let other = event.clone();
            let thread = std::thread::spawn(move || other.write());
            assert_eq!(event.wait().await.expect("wait"), 1);
            thread.join().expect("thread").expect("write");
        });
    });
}

#[test]
fn something_that_is_no_eventfd_is_an_error_and_not_an_endless_loop() {
    on_both(&Config::default(), |rt| {
        let (a, b) = Stream::pair().expect("pair");
        rt.block_on(async {
            b.write_all(b"abc").await.expect("write");
            let e = EventFd::from_fd(a.into()).expect("eventfd").wait().await;
            assert_eq!(e.expect_err("three bytes").kind(), ErrorKind::InvalidData);
        });
    });
}

#[test]
fn a_dropped_wait_takes_nothing_and_lets_go_of_the_descriptor() {
    on_both(&tiny(), |rt| {
        rt.block_on(async {
            let event = EventFd::new().expect("eventfd");
            for _ in 0..100 {
                assert!(timeout(Duration::ZERO, event.wait()).await.is_none());
            }
            event.write().expect("write");
            assert_eq!(event.wait().await.expect("wait"), 1);

            let (a, b) = Stream::pair().expect("pair");
            assert!(timeout(Duration::from_millis(1), readable(&a)).await.is_none());
            drop(a);
            // The other side sees the end only when nothing in the kernel holds the socket any more.
            let mut buf = [0; 1];
            assert_eq!(b.read(&mut buf).await.expect("read"), 0);
        });
    });
}
