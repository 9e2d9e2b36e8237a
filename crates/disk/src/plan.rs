//! The hot path: where one request's bytes are, answered from memory without waiting.

use crate::disk::Disk;
use crate::layer::Layer;
use bedplate_qcow2::{Qcow2, Run};
use bedplate_runtime::File;
use bedplate_runtime::sync::Pin;
use bedplate_storage::{DirectPin, SegmentBits, Storage};
use bedplate_types::{ByteLen, GuestOffset, HostOffset};
use std::sync::Arc;

/// How a request is to be carried out.
pub enum Plan<'a> {
    /// Do this very I/O on `file` at `at`, then call [`Disk::finish`] with `pin` on the same thread.
    Direct {
        /// The open file.
        file: &'a Arc<File>,
        /// Where in the file.
        at: HostOffset,
        /// Keeps the place from being given to anything else.
        pin: PlanPin,
    },
    /// A read of zeroes: fill the memory, done.
    Zeroes,
    /// Nothing to do: a null disk.
    Done,
    /// Use the asynchronous methods.
    Slow,
}

/// Keeps mapped space in place during direct I/O.
#[must_use = "a pin that is not finished keeps freed space from ever being used again"]
#[derive(Debug)]
pub struct PlanPin {
    map: Option<Pin>,
    io: DirectPin,
}

impl<S: Storage> Disk<S> {
    /// Finds out how to carry out a request of `len` bytes at `at`; `memory` is the alignment of its
    /// segments. Never waits, takes no lock.
    pub fn plan(
        &self,
        write: bool,
        at: GuestOffset,
        len: ByteLen,
        memory: SegmentBits,
    ) -> Plan<'_> {
        if self.check(at, len).is_err() || (write && self.read_only()) {
            return Plan::Slow; // which reports the error
        }
        match self.top() {
            Some(Layer::Null(_)) => Plan::Done,
            Some(Layer::Raw(storage)) => {
                let at = HostOffset::new(at.get());
                match direct(&**storage, write, at, len, memory) {
                    Some((file, io)) => Plan::Direct { file, at, pin: PlanPin { map: None, io } },
                    None => Plan::Slow,
                }
            }
            Some(Layer::Qcow2(image)) => self.plan_mapped(image, write, at, len, memory),
            None => Plan::Slow,
        }
    }

    fn plan_mapped<'a>(
        &self,
        image: &'a Qcow2<S>,
        write: bool,
        at: GuestOffset,
        len: ByteLen,
        memory: SegmentBits,
    ) -> Plan<'a> {
        // Without a write cache the mapping must be durable too, which only the slow road sees to.
        if write && (!self.write_cache() || image.is_poisoned()) {
            return Plan::Slow;
        }
        let map = image.epochs().pin();
        match image.lookup_run(write, at, len) {
            Run::At(host) => {
                if let Some((file, io)) = direct(image.data_storage(), write, host, len, memory) {
                    return Plan::Direct { file, at: host, pin: PlanPin { map: Some(map), io } };
                }
                image.epochs().unpin(map);
                Plan::Slow
            }
            Run::Zero => {
                image.epochs().unpin(map);
                Plan::Zeroes
            }
            Run::Unallocated if !write && self.depth() == 1 => {
                image.epochs().unpin(map);
                Plan::Zeroes
            }
            _ => {
                image.epochs().unpin(map);
                Plan::Slow
            }
        }
    }

    /// Ends a direct request, whatever came of it.
    pub fn finish(&self, pin: PlanPin) {
        match self.top() {
            Some(Layer::Raw(storage)) => storage.end_direct(pin.io),
            Some(Layer::Qcow2(image)) => {
                image.data_storage().end_direct(pin.io);
                if let Some(map) = pin.map {
                    image.epochs().unpin(map);
                }
            }
            _ => {}
        }
    }
}

fn direct<S: Storage>(
    storage: &S,
    write: bool,
    at: HostOffset,
    len: ByteLen,
    memory: SegmentBits,
) -> Option<(&Arc<File>, DirectPin)> {
    let file = storage.direct_file()?;
    let io = storage.begin_direct(write, at, len, memory)?;
    Some((file, io))
}
