//! Passphrases of encrypted images: from files and descriptors, never from the command line, where others can see them.

use bedplate_image::Passphrase;
use bedplate_types::{Error, ErrorKind, Result, limits};
use clap::Args;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where passphrases are.
#[derive(Args, Clone, Debug, Default)]
pub struct KeyArgs {
    /// The passphrase of an encrypted image is what this file holds, every byte of it (a newline at the end too)
    ///
    /// May be given several times; each passphrase is tried on each encrypted image of a chain.
    #[arg(long, value_name = "PATH")]
    key_file: Vec<PathBuf>,
    /// The passphrase is what this open descriptor gives up to its end: a pipe's or a file's
    #[arg(long, value_name = "N")]
    key_fd: Vec<u32>,
}

impl KeyArgs {
    /// Reads the passphrases.
    ///
    /// # Errors
    /// What reading reports; `InvalidInput` for a file without a byte or with too many, or for too many of them.
    pub fn read(&self) -> Result<Vec<Passphrase>> {
        let files = self.key_file.iter().map(|path| from_file(path));
        let fds = self.key_fd.iter().map(|fd| from_fd(*fd));
        let all = files.chain(fds).collect::<Result<Vec<_>>>()?;
        if all.len() > limits::MAX_PASSPHRASES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "{} passphrases were given; at most {} are tried",
                    all.len(),
                    limits::MAX_PASSPHRASES
                ),
            ));
        }
        Ok(all)
    }

    /// Reads the one passphrase of a new image.
    ///
    /// # Errors
    /// As [`Self::read`], and for more than one.
    pub fn read_one(&self) -> Result<Option<Passphrase>> {
        let mut all = self.read()?;
        if all.len() > 1 {
            let text = "a new image has one passphrase; give --key-file or --key-fd once";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(all.pop())
    }
}

fn read(path: &Path, what: &str) -> Result<Passphrase> {
    let cannot = |e| Error::io(format!("cannot read the passphrase from {what}"), e);
    let mut file = File::open(path).map_err(cannot)?;
    Passphrase::read(&mut file).map_err(|e| e.context(format!("{what} gives no passphrase")))
}

/// Reads a passphrase from a file.
///
/// # Errors
/// What reading reports, or `InvalidInput` for a file that holds none.
pub fn from_file(path: &Path) -> Result<Passphrase> {
    read(path, &format!("'{}'", path.display()))
}

/// Reads a passphrase from an open descriptor.
///
/// # Errors
/// As [`from_file`].
pub fn from_fd(fd: u32) -> Result<Passphrase> {
    read(Path::new(&format!("/proc/self/fd/{fd}")), &format!("descriptor {fd}"))
}

/// The passphrases that a session of qemu-io may use.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    /// All of them.
    pub passphrases: Vec<Passphrase>,
    /// The names of those that were given as objects.
    names: Vec<String>,
}

impl Secrets {
    /// Adds a secret as QEMU's programs take it: `secret,id=NAME,file=PATH`.
    ///
    /// # Errors
    /// A sentence for another object, for what is not supported of secrets, or for a file that can't be read.
    pub fn add_object(&mut self, text: &str) -> std::result::Result<(), String> {
        let refuse = |why: &str| Err(format!("--object: {why}"));
        let (mut id, mut file) = (None, None);
        // NUL can't come from a command line.
        for (n, part) in text.replace(",,", "\0").split(',').enumerate() {
            let part = part.replace('\0', ",");
            match part.split_once('=').unwrap_or((&part, "")) {
                ("secret", "") | ("qom-type", "secret") if n == 0 => {}
                _ if n == 0 => return refuse("only objects of the type 'secret' are supported"),
                ("id", value) => id = Some(value.to_owned()),
                ("file", value) => file = Some(PathBuf::from(value)),
                ("format", "raw") => {}
                ("data", _) => {
                    return refuse(
                        "a secret on the command line can be seen by others; give it in a file, with file=",
                    );
                }
                (key, _) => {
                    return refuse(&format!("the option '{key}' of a secret is not supported"));
                }
            }
        }
        let (Some(id), Some(file)) = (id, file) else {
            return refuse("a secret needs id= and file=");
        };
        self.passphrases.push(from_file(&file).map_err(|e| format!("{e:#}"))?);
        self.names.push(id);
        Ok(())
    }

    /// True when a secret of this name was given.
    pub fn has(&self, name: &str) -> bool {
        self.names.iter().any(|n| n == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_come_from_files_only() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "abc\n").expect("written");
        let mut secrets = Secrets::default();
        let path = file.path().display();
        secrets.add_object(&format!("secret,id=s,file={path}")).expect("a secret");
        assert_eq!(secrets.passphrases, [Passphrase::new(b"abc\n".to_vec()).expect("valid")]);
        assert!(secrets.has("s") && !secrets.has("t"));
        for wrong in [
            "secret,id=s,data=abc",
            "secret,id=s",
            "secret,file=/nowhere/at/all,id=s",
            "iothread,id=s",
            "",
        ] {
            assert!(secrets.add_object(wrong).is_err(), "{wrong}");
        }
    }
}
