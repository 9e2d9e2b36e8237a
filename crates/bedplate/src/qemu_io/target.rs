//! Which image is meant, and how it is to be opened: names, `json:` names and lists of options.
//!
//! Only files and block devices can be named, in the formats that Bedplate has. Whatever else an option asks for is
//! refused in words; nothing is ignored.

use crate::keys::Secrets;
use bedplate_image::ChainOptions;
use bedplate_types::{CacheMode, Format, parse_size};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What was asked for, as it was given.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The file's name, when it was given outside the options.
    pub name: Option<String>,
    /// Options by their full names.
    pub options: BTreeMap<String, String>,
    /// The format, when it was given outside the options.
    pub format: Option<String>,
    /// Refuse all changes.
    pub read_only: bool,
    /// Keep changes in a temporary file.
    pub snapshot: bool,
    /// How the host's page cache is used; `None`: every write is durable when it completes.
    pub cache: Option<CacheMode>,
    /// Whether discards reach the image; `None`: they do.
    pub unmap: Option<bool>,
    /// Copy into the image what is read from backing files.
    pub copy_on_read: bool,
    /// Use unaligned memory.
    pub misalign: bool,
    /// Read although another program may be writing.
    pub force_share: bool,
    /// The kernel's own asynchronous I/O was asked for by that name.
    pub native_aio: bool,
    /// What may open encrypted images.
    pub secrets: Secrets,
}

/// What is to be opened.
#[derive(Clone, Debug)]
pub struct Target {
    /// The image.
    pub path: PathBuf,
    /// How it and its backing files are opened.
    pub chain: ChainOptions,
    /// Keep changes in a temporary file.
    pub snapshot: bool,
    /// Whether discards reach the image.
    pub unmap: bool,
    /// Copy into the image what is read from backing files.
    pub copy_on_read: bool,
    /// Use unaligned memory.
    pub misalign: bool,
    /// Requests can be held.
    pub holds: bool,
}

/// The cache mode of this name.
pub fn cache_mode(name: &str) -> Result<CacheMode, String> {
    name.parse().map_err(|_| format!("Invalid cache option: {name}"))
}

/// Whether discards reach the image, in the mode of this name.
pub fn discard_mode(name: &str) -> Result<bool, String> {
    match name {
        "unmap" | "on" => Ok(true),
        "ignore" | "off" => Ok(false),
        _ => Err(format!("Invalid discard option: {name}")),
    }
}

impl Request {
    /// Adds options as lists have them: `key=value`, separated by commas; a comma in a value is doubled.
    pub fn apply(&mut self, text: &str) -> Result<(), String> {
        // NUL can't come from a command line.
        for part in text.replace(",,", "\0").split(',').filter(|part| !part.is_empty()) {
            let part = part.replace('\0', ",");
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!("'{part}' is not an option; write key=value"));
            };
            self.options.insert(key.to_owned(), value.to_owned());
        }
        Ok(())
    }

    /// What this asks to open.
    pub fn resolve(&self) -> Result<Target, String> {
        let mut keys = self.options.clone();
        let mut place = Place::default();
        if let Some(name) = &self.name {
            if ["filename", "file.filename"].iter().any(|key| keys.contains_key(*key)) {
                return Err("Can't specify 'file' and 'filename' options at the same time".into());
            }
            place.named(name, &mut keys)?;
        }
        let stated = keys.remove("driver");
        if stated.is_some() && self.format.is_some() {
            return Err("the format is stated twice: by -f, and by the option 'driver'".into());
        }
        let format = place.driver(stated.or_else(|| self.format.clone()), &mut keys)?;
        let Some(path) = place.path else {
            return Err("no file is named; name it, or give the option file.filename".into());
        };
        let mut wanted = Wanted::of(self);
        for (key, value) in keys {
            if matches!(key.as_str(), "encrypt.key-secret" | "backing.encrypt.key-secret") {
                if !self.secrets.has(&value) {
                    return Err(format!("No secret with id '{value}'"));
                }
                continue;
            }
            wanted.set(&key, &value)?;
        }
        wanted.check(self)?;
        Ok(Target {
            path: PathBuf::from(path),
            snapshot: self.snapshot,
            unmap: wanted.unmap,
            copy_on_read: self.copy_on_read,
            misalign: self.misalign,
            holds: place.holds,
            chain: ChainOptions {
                format,
                read_only: wanted.read_only,
                cache: wanted.mode(),
                // Calling this program on an image asks for the files that belong to it (`--help` says so).
                allow_backing: true,
                backing_format: wanted.backing_format,
                allow_data_file: true,
                data_file: wanted.data_file,
                force_share: wanted.force_share,
                l2_cache: wanted.l2_cache,
                passphrases: self.secrets.passphrases.clone(),
                ..ChainOptions::default()
            },
        })
    }
}

/// Where the image is.
#[derive(Default)]
struct Place {
    path: Option<String>,
    holds: bool,
}

impl Place {
    /// Takes a name apart; what a `json:` name says goes to `keys`.
    fn named(&mut self, name: &str, keys: &mut BTreeMap<String, String>) -> Result<(), String> {
        if let Some(text) = name.strip_prefix("json:") {
            let value: Value = serde_json::from_str(text)
                .map_err(|e| format!("Could not parse the JSON options: {e}"))?;
            return flatten("", &value, keys);
        }
        let mut name = name;
        if let Some(rest) = name.strip_prefix("blkdebug:") {
            let Some(file) = rest.strip_prefix(':') else {
                return Err(
                    "blkdebug: rules from a file are not supported; write blkdebug::FILE".into()
                );
            };
            self.holds = true;
            name = file;
        }
        let name = name.strip_prefix("file:").unwrap_or(name);
        if let Some(at) = name.find([':', '/'])
            && name[at..].starts_with(':')
        {
            return Err(format!(
                "Unknown protocol '{}'; only files can be opened, and a path with a colon in it starts with './'",
                &name[..at]
            ));
        }
        self.path = Some(name.to_owned());
        Ok(())
    }

    /// The format that the drivers in `keys` make up, and the file at their end.
    fn driver(
        &mut self,
        driver: Option<String>,
        keys: &mut BTreeMap<String, String>,
    ) -> Result<Option<Format>, String> {
        let mut take = |key: &str| keys.remove(key);
        let (format, direct) = match driver.as_deref() {
            None => (None, None),
            Some("raw") => (Some(Format::Raw), None),
            Some("qcow2") => (Some(Format::Qcow2), None),
            Some("file" | "host_device") => (Some(Format::Raw), take("filename")),
            Some(other) => return Err(format!("Unknown driver '{other}'")),
        };
        let mut path = direct;
        match take("file.driver").as_deref() {
            None | Some("file" | "host_device") => {}
            Some("blkdebug") => {
                self.holds = true;
                if let Some(inner) = take("file.image.driver")
                    && !matches!(inner.as_str(), "file" | "host_device")
                {
                    return Err(format!("blkdebug over the driver '{inner}' is not supported"));
                }
                path = path.or_else(|| take("file.image.filename"));
            }
            Some(other) => {
                return Err(format!("the driver '{other}' below an image is not supported"));
            }
        }
        if let Some(file) = take("file.filename") {
            path = Some(file);
        }
        if path.is_some() && self.path.is_some() {
            return Err("Can't specify 'file' and 'filename' options at the same time".into());
        }
        if path.is_some() {
            self.path = path;
        }
        Ok(format)
    }
}

/// Options of an opening, whoever gave them.
struct Wanted {
    read_only: bool,
    force_share: bool,
    unmap: bool,
    writethrough: bool,
    direct: bool,
    no_flush: bool,
    backing_format: Option<Format>,
    data_file: Option<PathBuf>,
    l2_cache: Option<bedplate_types::ByteLen>,
}

impl Wanted {
    fn of(request: &Request) -> Self {
        let cache = request.cache.unwrap_or(CacheMode::Writethrough);
        Self {
            read_only: request.read_only,
            force_share: request.force_share,
            unmap: request.unmap.unwrap_or(true),
            writethrough: !cache.write_cache(),
            direct: cache.direct(),
            no_flush: cache == CacheMode::Unsafe,
            backing_format: None,
            data_file: None,
            l2_cache: None,
        }
    }

    fn mode(&self) -> CacheMode {
        match (self.no_flush, self.direct, self.writethrough) {
            (true, ..) => CacheMode::Unsafe,
            (_, true, true) => CacheMode::Directsync,
            (_, true, false) => CacheMode::None,
            (_, false, true) => CacheMode::Writethrough,
            (_, false, false) => CacheMode::Writeback,
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key.strip_prefix("file.").unwrap_or(key) {
            "read-only" => self.read_only = on_off(key, value)?,
            "force-share" => self.force_share = on_off(key, value)?,
            "cache.direct" => self.direct = on_off(key, value)?,
            "cache.no-flush" => self.no_flush = on_off(key, value)?,
            "discard" => self.unmap = discard_mode(value)?,
            "backing.driver" => {
                let format = value.parse().map_err(|_| format!("Unknown driver '{value}'"))?;
                self.backing_format = Some(format);
            }
            "data-file.filename" => self.data_file = Some(value.into()),
            "data-file.driver" if matches!(value, "file" | "host_device") => {}
            "l2-cache-size" => {
                self.l2_cache = Some(parse_size(value).map_err(|e| format!("{key}: {e:#}"))?);
            }
            // What is done anyway.
            "detect-zeroes" if value == "off" => {}
            "locking" if matches!(value, "on" | "auto") => {}
            "encrypt.format" if value == "luks" => {}
            "auto-read-only" if matches!(value, "off" | "false") => {}
            _ => return Err(format!("the option '{key}={value}' is not supported")),
        }
        Ok(())
    }

    fn check(&self, request: &Request) -> Result<(), String> {
        if request.native_aio && !self.direct {
            return Err(
                "aio=native was specified, but it requires cache.direct=on, which was not specified.".into(),
            );
        }
        if self.force_share && !self.read_only {
            return Err("force-share=on can only be used with read-only images".into());
        }
        if request.snapshot && self.data_file.is_some() {
            return Err("-s and the option data-file.filename can't be used together".into());
        }
        if request.copy_on_read && self.read_only {
            return Err("Can't use copy-on-read on read-only device".into());
        }
        Ok(())
    }
}

fn on_off(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(format!("Parameter '{key}' expects 'on' or 'off'")),
    }
}

/// Turns nested objects into options with dots in their names.
fn flatten(prefix: &str, value: &Value, keys: &mut BTreeMap<String, String>) -> Result<(), String> {
    let text = match value {
        Value::Object(members) => {
            for (key, member) in members {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&name, member, keys)?;
            }
            return Ok(());
        }
        _ if prefix.is_empty() => return Err("Invalid JSON object given".into()),
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        Value::Null | Value::Array(_) => {
            return Err(format!("the value of '{prefix}' is not supported"));
        }
    };
    keys.insert(prefix.to_owned(), text);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Result<Target, String> {
        Request { name: Some(name.into()), ..Request::default() }.resolve()
    }

    fn listed(options: &str) -> Result<Target, String> {
        let mut request = Request::default();
        request.apply(options)?;
        request.resolve()
    }

    #[test]
    fn names_and_options_mean_the_same_file() {
        for target in [
            listed("driver=qcow2,file.driver=file,file.filename=/a,,b").expect("valid"),
            named(r#"json:{"driver": "qcow2", "file": {"driver": "file", "filename": "/a,b"}}"#)
                .expect("valid"),
            named(r#"json:{"driver": "qcow2", "file.filename": "/a,b"}"#).expect("valid"),
        ] {
            assert_eq!(target.path, PathBuf::from("/a,b"));
            assert_eq!(target.chain.format, Some(Format::Qcow2));
            assert_eq!(target.chain.cache, CacheMode::Writethrough);
        }
        let plain = named("file:a.qcow2").expect("valid");
        assert_eq!((plain.path, plain.chain.format), (PathBuf::from("a.qcow2"), None));
        assert!(named("blkdebug::a.qcow2").expect("valid").holds);
        assert_eq!(
            listed("driver=file,filename=a").expect("valid").chain.format,
            Some(Format::Raw)
        );
    }

    #[test]
    fn options_change_how_the_file_is_opened() {
        let target = listed(
            "driver=qcow2,file.filename=a,read-only=on,force-share=on,file.cache.direct=on,discard=ignore,\
             backing.driver=raw,l2-cache-size=1M",
        )
        .expect("valid");
        assert!(target.chain.read_only && target.chain.force_share && !target.unmap);
        assert_eq!(target.chain.cache, CacheMode::Directsync);
        assert_eq!(target.chain.backing_format, Some(Format::Raw));
    }

    #[test]
    fn what_is_not_supported_is_refused() {
        for name in [
            "nbd://host/x",
            "nbd:localhost:10809",
            "blkdebug:rules:a",
            "json:{",
            "json:3",
            r#"json:{"driver": "nbd", "host": "x"}"#,
            r#"json:{"driver": "qcow2", "file.filename": "a", "backing": null}"#,
            r#"json:{"driver": "qcow2", "file": {"driver": "blkdebug", "inject-error": [{}]}}"#,
        ] {
            assert!(named(name).is_err(), "{name}");
        }
        for options in [
            "driver=qcow2",
            "driver=vmdk,file.filename=a",
            "driver=qcow2,file.filename=a,foo=bar",
            "driver=qcow2,file.filename=a,file.locking=off",
            "driver=qcow2,file.filename=a,read-only=perhaps",
            "driver=qcow2,file.driver=nbd,file.filename=a",
            "driver=qcow2,file.filename=a,force-share=on",
            "a.qcow2",
        ] {
            assert!(listed(options).is_err(), "{options}");
        }
        let mut both = Request { name: Some("a".into()), ..Request::default() };
        both.apply("file.filename=a").expect("valid");
        assert!(both.resolve().is_err());
    }
}
