//! The program's command line.

use super::args::{Options, Spec};
use super::target::{Request, cache_mode, discard_mode};
use crate::keys::{self, Secrets};
use bedplate_runtime::Backend;
use std::path::Path;

/// What the command line asks for.
#[derive(Default)]
pub struct Program {
    /// How the file named on it is to be opened.
    pub open: Request,
    /// Commands, in order; without any they are read from the standard input.
    pub commands: Vec<String>,
    /// How I/O is done.
    pub backend: Backend,
    /// Print this and end well.
    pub just_print: Option<String>,
}

/// Why a command line can't be followed.
pub enum Usage {
    /// It can't be read: the words for it, and the help follows.
    Unreadable(Option<String>),
    /// It can be read, but not be done.
    Refused(String),
}

const SPECS: &[Spec] = &[
    spec('h', "help", false),
    spec('V', "version", false),
    spec('c', "cmd", true),
    spec('f', "format", true),
    spec('r', "read-only", false),
    spec('s', "snapshot", false),
    spec('n', "nocache", false),
    spec('C', "copy-on-read", false),
    spec('m', "misalign", false),
    spec('k', "native-aio", false),
    spec('i', "aio", true),
    spec('d', "discard", true),
    spec('t', "cache", true),
    spec('T', "trace", true),
    spec('U', "force-share", false),
    spec(OBJECT, "object", true),
    spec(IMAGE_OPTS, "image-opts", false),
    spec(KEY_FILE, "key-file", true),
    spec(KEY_FD, "key-fd", true),
];

// Long options without a letter get one that nobody can type.
const OBJECT: char = '\u{1}';
const IMAGE_OPTS: char = '\u{2}';
const KEY_FILE: char = '\u{3}';
const KEY_FD: char = '\u{4}';

const fn spec(key: char, long: &'static str, value: bool) -> Spec {
    Spec { key, long: Some(long), value }
}

/// The text for `--help`.
pub const HELP: &str = "\
Usage: qemu-io [OPTION]... [-c COMMAND]... [FILE]

Reads, writes and examines an image by commands, as the program of this name that comes with QEMU does; the file
is used by Bedplate's own engine. Scripts that were written for that program work with this one.

  -c, --cmd=COMMAND    do this; may be given several times. Without it commands are read from the standard input
  -f, --format=FMT     the image's format: raw or qcow2 [default: told by the extension]
  -r, --read-only      refuse all changes
  -s, --snapshot       keep all changes in a temporary file that goes away at the end
  -t, --cache=MODE     writeback, none, writethrough, directsync or unsafe [default: writethrough]
  -n, --nocache        short for -t none
  -d, --discard=MODE   unmap: discards give space back [default]; ignore: they do nothing
  -i, --aio=MODE       how I/O is done: threads, or io_uring (also called native) [default: io_uring where it can be had]
  -k, --native-aio     short for -i native; needs -n or -t none
  -C, --copy-on-read   what is read from a backing file is copied into the image
  -m, --misalign       use memory that direct I/O can't use as it is
  -U, --force-share    read although another program may be writing; needs -r
      --image-opts     FILE is a list of options: driver=qcow2,file.filename=PATH
      --object         secret,id=NAME,file=PATH: a passphrase, for the option encrypt.key-secret=NAME
      --key-file=PATH  the passphrase of encrypted images is what this file holds
      --key-fd=N       the passphrase is what this open descriptor gives up to its end
  -h, --help           print this
  -V, --version        print the version

FILE is a path, or json:{\"driver\": ..., \"file\": {...}}; blkdebug::PATH lets requests be held by 'break'.
The backing files that the image names are opened too, as the person who calls this program asks for by doing so;
each must have its format stated, by the image over it or by backing.driver=FMT. So are external data files, or the
one that data-file.filename=PATH states.

'qemu-io -c help' lists the commands. The exit code is 0 when all went well, else 1.
";

/// Reads the command line.
pub fn parse(words: &[String]) -> Result<Program, Usage> {
    let mut program = Program::default();
    let mut image_opts = false;
    let mut options = Options::new(SPECS, words);
    for option in options.by_ref() {
        let option = option.map_err(|e| Usage::Unreadable(Some(e)))?;
        let value = option.value;
        let open = &mut program.open;
        match option.key {
            'h' => program.just_print = Some(HELP.into()),
            'V' => {
                program.just_print =
                    Some(format!("qemu-io of Bedplate {}\n", env!("CARGO_PKG_VERSION")));
            }
            'c' => program.commands.push(value),
            'f' => open.format = Some(value),
            'r' => open.read_only = true,
            's' => open.snapshot = true,
            'n' => open.cache = Some(cache_mode("none").map_err(Usage::Refused)?),
            't' => open.cache = Some(cache_mode(&value).map_err(Usage::Refused)?),
            'd' => open.unmap = Some(discard_mode(&value).map_err(Usage::Refused)?),
            'C' => open.copy_on_read = true,
            'm' => open.misalign = true,
            'U' => open.force_share = true,
            'k' => set_aio(&mut program, "native")?,
            'i' => set_aio(&mut program, &value)?,
            'T' => {
                let text =
                    "tracing is asked for with RUST_LOG=trace in the environment, not with -T";
                return Err(Usage::Refused(text.into()));
            }
            OBJECT => {
                open.secrets.add_object(&value).map_err(Usage::Refused)?;
            }
            IMAGE_OPTS => image_opts = true,
            KEY_FILE | KEY_FD => add_key(&mut open.secrets, option.key, &value)?,
            _ => return Err(Usage::Unreadable(None)),
        }
        if program.just_print.is_some() {
            return Ok(program);
        }
    }
    match options.rest().as_slice() {
        [] => {}
        [file] if image_opts => {
            if program.open.format.is_some() {
                return Err(Usage::Refused("--image-opts and -f are mutually exclusive".into()));
            }
            program.open.apply(file).map_err(Usage::Refused)?;
        }
        [file] => program.open.name = Some((*file).to_owned()),
        _ => return Err(Usage::Unreadable(None)),
    }
    Ok(program)
}

fn add_key(secrets: &mut Secrets, key: char, value: &str) -> Result<(), Usage> {
    let found = match (key, value.parse()) {
        (KEY_FILE, _) => keys::from_file(Path::new(value)),
        (_, Ok(fd)) => keys::from_fd(fd),
        _ => return Err(Usage::Refused(format!("--key-fd {value} is no number"))),
    };
    secrets.passphrases.push(found.map_err(|e| Usage::Refused(format!("{e:#}")))?);
    Ok(())
}

fn set_aio(program: &mut Program, mode: &str) -> Result<(), Usage> {
    program.backend = backend(mode).map_err(Usage::Refused)?;
    program.open.native_aio = mode == "native";
    Ok(())
}

/// How I/O is done for a way that is called `mode`.
pub fn backend(mode: &str) -> Result<Backend, String> {
    match mode {
        "threads" => Ok(Backend::Threads),
        // The kernel's older interface has nothing that io_uring has not.
        "native" | "io_uring" => Ok(Backend::Uring),
        _ => Err(format!("Invalid aio option: {mode}")),
    }
}
