//! The byte stream that both phases of a session run on, and a buffered reader over it.
//!
//! Callers: negotiation and transmission. The trait keeps them free of sockets, so that tests run them in memory.
//! A reader survives the change from negotiation to transmission: what a client sent ahead is not lost.

use std::io::{self, IoSlice};

/// A connected stream of bytes. Methods take `&self`: one task reads while another writes.
#[allow(async_fn_in_trait)] // Futures stay on the thread that made them, by design.
pub trait ByteStream {
    /// Reads at least one byte, or none at the end of the stream. A dropped future has read nothing.
    async fn read(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Writes all bytes of all slices, in order.
    async fn write_all(&self, bufs: &mut [IoSlice<'_>]) -> io::Result<()>;
}

/// Bytes of a reader's buffer: many pipelined small requests arrive in one system call.
pub const INPUT_BUFFER: usize = 128 << 10;

/// A buffered reader.
pub struct Input<'s, S> {
    stream: &'s S,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<'s, S: ByteStream> Input<'s, S> {
    /// A reader of `stream` with an empty buffer.
    pub fn new(stream: &'s S) -> Self {
        Self { stream, buf: vec![0; INPUT_BUFFER].into_boxed_slice(), start: 0, end: 0 }
    }

    /// The stream underneath, for writing.
    pub fn stream(&self) -> &'s S {
        self.stream
    }

    /// The bytes that are here already.
    pub fn buffered(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Drops `n` of the bytes that are here already.
    pub fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
    }

    /// Refills the empty buffer; false at the end of the stream.
    async fn refill(&mut self) -> io::Result<bool> {
        (self.start, self.end) = (0, 0);
        self.end = self.stream.read(&mut self.buf).await?.min(self.buf.len());
        Ok(self.end != 0)
    }

    /// Fills `out`. What is not buffered goes straight into `out` when it is large.
    ///
    /// # Errors
    /// `UnexpectedEof` when the stream ends before; errors of the stream.
    pub async fn read_exact(&mut self, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            let have = self.buffered();
            if have.is_empty() {
                let left = &mut out[done..];
                if left.len() >= INPUT_BUFFER / 4 {
                    match self.stream.read(left).await? {
                        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                        n => done += n.min(left.len()),
                    }
                } else if !self.refill().await? {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                continue;
            }
            let n = have.len().min(out.len() - done);
            out[done..done + n].copy_from_slice(&have[..n]);
            self.consume(n);
            done += n;
        }
        Ok(())
    }

    /// As [`Self::read_exact`], but false when the stream ended cleanly before the first byte.
    ///
    /// # Errors
    /// As [`Self::read_exact`].
    pub async fn read_exact_or_end(&mut self, out: &mut [u8]) -> io::Result<bool> {
        if self.buffered().is_empty() && !self.refill().await? {
            return Ok(false);
        }
        self.read_exact(out).await.map(|()| true)
    }

    /// Reads `n` bytes and forgets them.
    ///
    /// # Errors
    /// As [`Self::read_exact`].
    pub async fn skip(&mut self, mut n: u64) -> io::Result<()> {
        while n > 0 {
            if self.buffered().is_empty() && !self.refill().await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let have = self.buffered().len();
            let take = usize::try_from(n).unwrap_or(have).min(have);
            self.consume(take);
            n -= take as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod memory {
    //! A stream in memory: what the client sends is given, what it gets is kept.
    use super::ByteStream;
    use std::cell::RefCell;
    use std::future::Future;
    use std::io::{self, IoSlice};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    pub struct Memory {
        pub input: RefCell<Vec<u8>>,
        pub output: RefCell<Vec<u8>>,
        /// Bytes given out in one read.
        pub piece: usize,
    }

    impl Memory {
        pub fn new(input: &[u8], piece: usize) -> Self {
            Self { input: RefCell::new(input.to_vec()), output: RefCell::default(), piece }
        }
    }

    impl ByteStream for Memory {
        async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
            let mut input = self.input.borrow_mut();
            let n = input.len().min(buf.len()).min(self.piece);
            buf[..n].copy_from_slice(&input[..n]);
            input.drain(..n);
            Ok(n)
        }

        async fn write_all(&self, bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
            bufs.iter().for_each(|b| self.output.borrow_mut().extend_from_slice(b));
            Ok(())
        }
    }

    /// Runs a future that never has to wait.
    pub fn run<F: Future>(f: F) -> F::Output {
        match pin!(f).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(v) => v,
            Poll::Pending => panic!("a stream in memory never waits"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::memory::{Memory, run};
    use super::*;

    #[test]
    fn reads_are_put_together_from_any_pieces() {
        let data: Vec<u8> = (0..=255).cycle().take(3 * INPUT_BUFFER).collect();
        for piece in [1, 7, INPUT_BUFFER, usize::MAX] {
            let m = Memory::new(&data, piece);
            let mut input = Input::new(&m);
            let mut head = [0; 5];
            run(input.read_exact(&mut head)).expect("enough");
            run(input.skip(10)).expect("enough");
            let mut rest = vec![0; data.len() - 15];
            run(input.read_exact(&mut rest)).expect("enough");
            assert_eq!((&head[..], &rest[..]), (&data[..5], &data[15..]));
            assert!(!run(input.read_exact_or_end(&mut head)).expect("a clean end"));
        }
    }

    #[test]
    fn an_end_in_the_middle_is_an_error() {
        let m = Memory::new(&[1, 2, 3], 2);
        let mut input = Input::new(&m);
        assert!(run(input.read_exact_or_end(&mut [0; 4])).is_err());
        assert!(run(Input::new(&Memory::new(&[1], 1)).skip(2)).is_err());
    }
}
