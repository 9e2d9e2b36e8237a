//! The file that is open, from its opening to its clean end.

use super::commands::{Failed, Ran, fail_aloud};
use super::device::Device;
use super::report::complain;
use super::target::{Request, Target};
use bedplate_image::{Backing, CreateOptions, OpenedDisk, create, format_of, open_chain};
use bedplate_runtime::Backend;
use bedplate_types::{Error, ErrorKind, Format, Result};
use std::rc::Rc;

/// What lasts from one command to the next.
pub struct Session {
    /// The open file.
    pub device: Option<Rc<Device>>,
    /// What was asked for when it was opened.
    pub request: Request,
    /// The program is to end.
    pub quit: bool,
    /// How this thread does I/O.
    backend: Backend,
    uring: bool,
}

impl Session {
    /// Without an open file.
    pub fn new(backend: Backend, uring: bool) -> Self {
        Self { device: None, request: Request::default(), quit: false, backend, uring }
    }

    /// True when I/O is done in this way.
    pub fn does(&self, wanted: Backend) -> bool {
        self.backend == wanted || (wanted == Backend::Uring) == self.uring
    }

    /// The open file.
    ///
    /// # Errors
    /// When there is none.
    pub fn device(&self) -> Result<Rc<Device>, Failed> {
        self.device.clone().map_or_else(|| fail_aloud("no file open, try 'help open'"), Ok)
    }

    /// Opens what `request` asks for.
    pub async fn open(&mut self, request: Request) -> Ran {
        if self.device.is_some() {
            return fail_aloud("qemu-io: file open already, try 'help close'");
        }
        let opened = match request.resolve() {
            Ok(target) => open(target).await.map_err(|e| told(&e)),
            Err(e) => Err(e),
        };
        match opened {
            Ok(device) => {
                self.device = Some(Rc::new(device));
                self.request = request;
                Ok(())
            }
            Err(e) => {
                let name = request.name.map(|name| format!(" device {name}")).unwrap_or_default();
                fail_aloud(format!("qemu-io: can't open{name}: {e}"))
            }
        }
    }

    /// Waits for all requests, makes everything durable and closes the file.
    pub async fn close(&mut self) -> Ran {
        let Some(device) = self.device.take() else { return Ok(()) };
        device.settle().await;
        match device.disk.close().await {
            Ok(()) => Ok(()),
            Err(e) => fail_aloud(format!("qemu-io: {e:#}")),
        }
    }

    /// Closes the file and opens it in another way; where that fails, in the old way.
    pub async fn reopen(&mut self, request: Request) -> Ran {
        if let Err(e) = request.resolve() {
            return fail_aloud(format!("qemu-io: {e}"));
        }
        let before = self.request.clone();
        self.close().await?;
        let Err(failed) = self.open(request).await else { return Ok(()) };
        if self.open(before).await.is_err() {
            complain(
                "qemu-io: the file could not be opened in the old way either; it is closed now",
            );
        }
        Err(failed)
    }
}

async fn open(target: Target) -> Result<Device> {
    let opened = match target.snapshot && !target.chain.read_only {
        true => over_temporary(&target).await?,
        false => open_chain(&target.path, &target.chain).await?,
    };
    Ok(Device::new(&opened, target))
}

/// A disk over an image that takes the changes and is gone when it is closed: its file has no name any more.
async fn over_temporary(target: &Target) -> Result<OpenedDisk> {
    let cannot = |e| Error::io("cannot make a temporary image", e);
    let folder = std::env::var_os("TMPDIR").unwrap_or_else(|| "/var/tmp".into());
    let folder = tempfile::Builder::new().prefix("bedplate-").tempdir_in(folder).map_err(cannot)?;
    let path = folder.path().join("snapshot.qcow2");
    let below = std::fs::canonicalize(&target.path)
        .map_err(|e| Error::io(format!("cannot open '{}'", target.path.display()), e))?;
    let mut options = CreateOptions::new(&path, Format::Qcow2);
    options.backing = Some(Backing {
        name: below,
        format: Some(format_of(&target.path, target.chain.format)?),
        unchecked: false,
    });
    create(&options).await?;
    let mut chain = target.chain.clone();
    chain.format = Some(Format::Qcow2);
    open_chain(&path, &chain).await
}

/// An error of opening, where there is one in the words that scripts know.
fn told(e: &Error) -> String {
    match e.raw_errno() {
        Some(errno) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Denied) => {
            format!("{e}: {}", super::report::words_of(errno))
        }
        _ => format!("{e:#}"),
    }
}
