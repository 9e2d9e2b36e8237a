//! `bedplate qemu-io`, and this program under the name `qemu-io`: the command line that people script tests of images
//! with, on Bedplate's own engine.
//!
//! Messages on the standard output, and exit codes, are those of the program that comes with QEMU 10; a test compares
//! the two. Everything runs on one thread; `aio_read` and `aio_write` start tasks of their own. The process ends with 0
//! when everything went well, else with 1.

mod aio;
mod args;
mod commands;
mod device;
mod hold;
mod life;
mod numbers;
mod options;
mod report;
mod rw;
mod session;
mod space;
mod target;

use bedplate_runtime::{Config, Runtime, readable, timeout};
use clap::Args;
use options::{HELP, Program, Usage};
use report::{complain, print};
use session::Session;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// Read, write and examine an image by commands, with the command line of QEMU's qemu-io
///
/// Called by the name 'qemu-io', this program is the same. 'bedplate qemu-io --help' tells its options.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub struct QemuIoArgs {
    /// Options, commands and the image, as for qemu-io
    #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

/// How often the disk is looked after while nothing is asked of it.
const MAINTENANCE: Duration = Duration::from_secs(1);
/// Bytes taken from the standard input at once.
const INPUT_BYTES: usize = 4096;

/// Runs with the words behind the program's name.
pub fn run(words: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Result<Vec<String>, OsString> = words.map(OsString::into_string).collect();
    let words = match words {
        Ok(words) => words,
        Err(word) => {
            complain(&format!("qemu-io: '{}' is not UTF-8", word.to_string_lossy()));
            return ExitCode::FAILURE;
        }
    };
    let good = match options::parse(&words) {
        Ok(Program { just_print: Some(text), .. }) => {
            print(&text);
            true
        }
        Ok(program) => work(program),
        Err(Usage::Refused(text)) => {
            complain(&format!("qemu-io: {text}"));
            false
        }
        Err(Usage::Unreadable(words)) => {
            if let Some(words) = words {
                complain(&format!("qemu-io: {words}"));
            }
            print(HELP);
            false
        }
    };
    if good && !report::lost() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Opens the file and does what is asked; true when all of it went well.
fn work(program: Program) -> bool {
    let config = Config { spin: Duration::ZERO, backend: program.backend, ..Config::default() };
    let runtime = match Runtime::new(config) {
        Ok(runtime) => runtime,
        Err(e) => {
            complain(&format!("qemu-io: {e:#}"));
            return false;
        }
    };
    runtime.block_on(async {
        let mut session = Session::new(program.backend, runtime.is_uring());
        session.request.secrets = program.open.secrets.clone();
        let named = program.open.name.is_some() || !program.open.options.is_empty();
        if named && session.open(program.open).await.is_err() {
            return false;
        }
        let mut good = true;
        if program.commands.is_empty() {
            good = converse(&mut session).await;
        }
        for line in &program.commands {
            if session.quit {
                break;
            }
            good &= commands::run(&mut session, line).await.is_ok();
        }
        session.close().await.is_ok() && good
    })
}

/// Takes commands from the standard input until it ends.
async fn converse(session: &mut Session) -> bool {
    let mut good = true;
    let mut input = Input::default();
    while !session.quit {
        print("qemu-io> ");
        let line = match input.line(session).await {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(e) => {
                complain(&format!("qemu-io: cannot read the standard input: {e}"));
                return false;
            }
        };
        good &= commands::run(session, &line).await.is_ok();
    }
    good
}

/// Lines of the standard input, waited for without blocking the thread: requests go on meanwhile.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    ended: bool,
}

impl Input {
    async fn line(&mut self, session: &Session) -> std::io::Result<Option<String>> {
        loop {
            let end = self.bytes.iter().position(|b| *b == b'\n');
            if let Some(end) = end {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                return Ok(Some(String::from_utf8_lossy(line).into_owned()));
            }
            if self.ended {
                let line = std::mem::take(&mut self.bytes);
                let text = String::from_utf8_lossy(&line).into_owned();
                return Ok((!text.is_empty()).then_some(text));
            }
            self.wait(session).await?;
            let mut chunk = [0; INPUT_BYTES];
            match rustix::io::read(std::io::stdin(), &mut chunk) {
                Ok(0) => self.ended = true,
                Ok(n) => self.bytes.extend(chunk.iter().take(n)),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Waits for input, and looks after the disk meanwhile.
    async fn wait(&self, session: &Session) -> std::io::Result<()> {
        loop {
            if let Some(ready) = timeout(MAINTENANCE, readable(std::io::stdin())).await {
                return ready;
            }
            if let Some(device) = &session.device
                && let Err(e) = device.disk.maintain().await
            {
                complain(&format!("qemu-io: {e:#}"));
            }
        }
    }
}
