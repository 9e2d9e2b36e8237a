//! What the load engine needs of a target: one thread's way to send requests and hear that they are complete.
//!
//! Callers: [`crate::drive`], for whatever implements it (`target`). Another kind of target (vhost-user-scsi, say) joins by
//! implementing this.

use crate::plan::Step;
use bedplate_types::Result;
use std::time::Duration;

/// A request that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its slot.
    pub slot: usize,
    /// How it went.
    pub status: Status,
}

/// How a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Well.
    Good,
    /// With the system's (or NBD's) error number.
    Errno(i32),
    /// With fewer bytes than asked for.
    Short,
    /// With an error that has no number.
    Failed,
}

impl Status {
    /// From what a system call gave: bytes, or a negative error number.
    pub fn of(result: i32, wanted: u32) -> Status {
        match result {
            n if n < 0 => Status::Errno(n.saturating_neg()),
            n if n.unsigned_abs() == wanted => Status::Good,
            _ => Status::Short,
        }
    }
}

/// One thread's way to a target. Requests have slots from 0 on, each with memory of its own for one request at a time.
pub trait Port: Send {
    /// Called once on the thread that will use it.
    ///
    /// # Errors
    /// Of the system.
    fn start(&mut self) -> Result<()> {
        Ok(())
    }

    /// Fills the start of a slot's memory; the slot is not in flight.
    ///
    /// # Errors
    /// `InvalidInput` for a slot that does not exist or is too small.
    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()>;

    /// Copies the start of a slot's memory; the slot is not in flight.
    ///
    /// # Errors
    /// As [`Self::put`].
    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()>;

    /// Prepares a request, which may be sent at once or by [`Self::exchange`].
    ///
    /// # Errors
    /// As [`Self::put`], or of the connection.
    fn push(&mut self, slot: usize, step: Step) -> Result<()>;

    /// Sends what was pushed and takes no completions.
    ///
    /// # Errors
    /// Of the connection.
    fn send(&mut self) -> Result<()> {
        Ok(())
    }

    /// Sends what was pushed, waits for at least one completion (at most `limit`; `None`: for ever; nothing in flight: not at
    /// all), and adds what is complete to `done`, but no more than `most`.
    ///
    /// # Errors
    /// Of the connection as a whole; what fails one request is told in `done`.
    fn exchange(
        &mut self,
        limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()>;
}

impl<P: Port> Port for &mut P {
    fn start(&mut self) -> Result<()> {
        (**self).start()
    }

    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        (**self).put(slot, data)
    }

    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        (**self).get(slot, data)
    }

    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        (**self).push(slot, step)
    }

    fn send(&mut self) -> Result<()> {
        (**self).send()
    }

    fn exchange(
        &mut self,
        limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        (**self).exchange(limit, most, done)
    }
}
