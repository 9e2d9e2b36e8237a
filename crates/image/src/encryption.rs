//! The encryption of images: options of new ones, and the description of those that are there.
//!
//! Callers: `create` and `info`. Options and keys are those of qemu-img.

use bedplate_qcow2::format::{
    Header, LuksArea, LuksCipher, LuksHash, LuksHeader, LuksIv, LuksSuite,
};
use bedplate_qcow2::{Passphrase, new_luks_area};
use bedplate_types::{Error, ErrorKind, Result};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// How long the derivation of a new key takes, when nothing else is asked for (as QEMU).
const USUAL_TIME: Duration = Duration::from_secs(2);
/// The longest time that can be asked for.
const LONGEST_MS: u64 = 10_000;

/// The encryption of a new image, as options ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEncryption {
    /// Encrypt, with LUKS.
    pub luks: bool,
    /// An option of the encryption was given.
    stated: bool,
    /// Cipher and hash.
    pub suite: LuksSuite,
    /// How long the derivation of the key shall take on this host.
    pub time: Duration,
}

impl Default for NewEncryption {
    fn default() -> Self {
        Self { luks: false, stated: false, suite: LuksSuite::default(), time: USUAL_TIME }
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// The value of this name, or a sentence that names those that there are.
fn choose<T: Copy>(key: &str, value: &str, all: &[(&str, T)]) -> Result<T> {
    let found = all.iter().find(|(name, _)| *name == value);
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let known: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        let text = format!("{key}={value} is not supported; supported: {}", known.join(", "));
        Error::new(ErrorKind::Unsupported, text)
    })
}

impl NewEncryption {
    /// Takes an option; false when it is not one of the encryption.
    ///
    /// # Errors
    /// `InvalidInput` or `Unsupported` for a value that can't be.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        const OLD: &str =
            "qcow2's old AES encryption is not secure and not supported; use encrypt.format=luks";
        match key {
            "encryption" if matches!(value, "off" | "no" | "false") => return Ok(true),
            "encryption" => return Err(Error::new(ErrorKind::Unsupported, OLD)),
            "encrypt.format" if value == "aes" => {
                return Err(Error::new(ErrorKind::Unsupported, OLD));
            }
            "encrypt.format" => self.luks = choose(key, value, &[("luks", true)])?,
            "encrypt.cipher-alg" => {
                let all = [LuksCipher::Aes256, LuksCipher::Aes128].map(|c| (c.name(), c));
                self.suite.cipher = choose(key, value, &all)?;
            }
            "encrypt.cipher-mode" => choose(key, value, &[("xts", ())])?,
            "encrypt.ivgen-alg" => {
                let all = [LuksIv::Plain64, LuksIv::Plain].map(|iv| (iv.name(), iv));
                self.suite.iv = choose(key, value, &all)?;
            }
            "encrypt.hash-alg" => {
                let all =
                    [LuksHash::Sha256, LuksHash::Sha512, LuksHash::Sha1].map(|h| (h.name(), h));
                self.suite.hash = choose(key, value, &all)?;
            }
            "encrypt.iter-time" => {
                let time = value.parse().ok().filter(|ms| (1..=LONGEST_MS).contains(ms));
                let time = time.ok_or_else(|| {
                    invalid(format!(
                        "{key}={value} is not a number of milliseconds from 1 to {LONGEST_MS}"
                    ))
                })?;
                self.time = Duration::from_millis(time);
            }
            "encrypt.key-secret" => {
                return Err(invalid(
                    "the passphrase is given in a file with --key-file, or on an open descriptor with --key-fd; leave \
                     encrypt.key-secret out",
                ));
            }
            _ => return Ok(false),
        }
        self.stated = true;
        Ok(true)
    }

    /// Makes the encryption, if there is to be one.
    ///
    /// # Errors
    /// `InvalidInput` when options and passphrase don't go together.
    pub(crate) fn make(&self, passphrase: Option<&Passphrase>) -> Result<Option<LuksArea>> {
        match (self.luks, passphrase) {
            (true, Some(passphrase)) => new_luks_area(self.suite, self.time, passphrase).map(Some),
            (true, None) => Err(invalid(
                "an encrypted image needs a passphrase; give it in a file with --key-file, or on an open descriptor \
                 with --key-fd",
            )),
            (false, None) if !self.stated => Ok(None),
            (false, _) => Err(invalid(
                "a passphrase or an option of the encryption was given, but no encryption was asked for; add \
                 -o encrypt.format=luks",
            )),
        }
    }
}

impl fmt::Display for NewEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.luks {
            return Ok(());
        }
        let LuksSuite { cipher, iv, hash } = self.suite;
        write!(
            f,
            " encrypt.format=luks encrypt.cipher-alg={} encrypt.cipher-mode=xts encrypt.ivgen-alg={} encrypt.hash-alg={} \
             encrypt.iter-time={}",
            cipher.name(),
            iv.name(),
            hash.name(),
            self.time.as_millis()
        )
    }
}

/// How an image is encrypted.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct EncryptInfo {
    /// How sectors' numbers become initial values (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ivgen_alg: Option<String>,
    /// The hash of that, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ivgen_hash_alg: Option<String>,
    /// The encryption's header is in another file: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detached_header: Option<bool>,
    /// The hash of key derivation (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash_alg: Option<String>,
    /// The cipher with its key's bits (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cipher_alg: Option<String>,
    /// The volume's UUID (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// "aes" or "luks".
    pub format: &'static str,
    /// How blocks are chained (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cipher_mode: Option<String>,
    /// The key slots (LUKS).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<SlotInfo>,
    /// Where data would begin if it followed the header (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_offset: Option<u64>,
    /// Rounds of derivation for the master key's digest (LUKS).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub master_key_iters: Option<u32>,
}

/// A key slot of LUKS.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SlotInfo {
    /// It holds the key under a passphrase.
    pub active: bool,
    /// Rounds of derivation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iters: Option<u32>,
    /// Where its key material begins in the header.
    pub key_offset: u64,
    /// Stripes of the key material.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stripes: Option<u32>,
}

/// What is said of an image's encryption; without `luks`, which of them it is.
pub(crate) fn encrypt_info(header: &Header, luks: Option<&LuksHeader>) -> Option<EncryptInfo> {
    let format = match header.crypt_method {
        1 => "aes",
        2 => "luks",
        _ => return None,
    };
    let Some(luks) = luks else { return Some(EncryptInfo { format, ..EncryptInfo::default() }) };
    let (mode, iv) = luks.mode_parts();
    let (iv, iv_hash) = iv.split_once(':').map_or((iv, None), |(iv, hash)| (iv, Some(hash)));
    // XTS has two keys of the cipher.
    let bits = u64::from(luks.key_bytes) * if mode == "xts" { 4 } else { 8 };
    let slots = luks.slots.iter().map(|slot| SlotInfo {
        active: slot.active,
        iters: slot.active.then_some(slot.iterations),
        key_offset: slot.offset,
        stripes: slot.active.then_some(slot.stripes),
    });
    Some(EncryptInfo {
        ivgen_alg: Some(iv.to_owned()),
        ivgen_hash_alg: iv_hash.map(str::to_owned),
        detached_header: Some(false),
        hash_alg: Some(luks.hash.clone()),
        cipher_alg: Some(format!("{}-{bits}", luks.cipher)),
        uuid: Some(luks.uuid.clone()),
        format,
        cipher_mode: Some(mode.to_owned()),
        slots: slots.collect(),
        payload_offset: Some(luks.payload_offset),
        master_key_iters: Some(luks.digest_iterations),
    })
}

impl EncryptInfo {
    /// Adds the lines that qemu-img has.
    pub(crate) fn describe(&self, out: &mut String) -> fmt::Result {
        if self.slots.is_empty() {
            return writeln!(out, "    encrypt: {}", self.format);
        }
        writeln!(out, "    encrypt:")?;
        let mut line = |name: &str, value: Option<&str>| match value {
            Some(value) => writeln!(out, "        {name}: {value}"),
            None => Ok(()),
        };
        line("ivgen alg", self.ivgen_alg.as_deref())?;
        line(
            "detached header",
            self.detached_header.map(|yes| if yes { "true" } else { "false" }),
        )?;
        line("hash alg", self.hash_alg.as_deref())?;
        line("cipher alg", self.cipher_alg.as_deref())?;
        line("uuid", self.uuid.as_deref())?;
        line("ivgen hash alg", self.ivgen_hash_alg.as_deref())?;
        line("format", Some(self.format))?;
        line("cipher mode", self.cipher_mode.as_deref())?;
        writeln!(out, "        slots:")?;
        for (n, slot) in self.slots.iter().enumerate() {
            writeln!(out, "            [{n}]:\n                active: {}", slot.active)?;
            if let Some(iters) = slot.iters {
                writeln!(out, "                iters: {iters}")?;
            }
            writeln!(out, "                key offset: {}", slot.key_offset)?;
            if let Some(stripes) = slot.stripes {
                writeln!(out, "                stripes: {stripes}")?;
            }
        }
        if let Some(offset) = self.payload_offset {
            writeln!(out, "        payload offset: {offset}")?;
        }
        if let Some(iters) = self.master_key_iters {
            writeln!(out, "        master key iters: {iters}")?;
        }
        Ok(())
    }
}
