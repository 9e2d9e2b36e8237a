//! apt, with lists and sources of its own under the target folder.
//!
//! So nothing of the machine's own apt configuration changes: the machine's sources are copied, the suite `*-backports` is added
//! when the machine's own suite has no recent QEMU, and `apt-get update` writes its lists beside them. It works without root for
//! everything but installing.

use anyhow::{Context, Result, bail};
use bedplate_tests::{host, paths};
use std::path::PathBuf;
use std::process::Command;

/// The private sources and lists.
pub struct Apt {
    dir: PathBuf,
    updated: bool,
}

impl Apt {
    /// Prepares the folders and copies the machine's sources; an error when this is no machine with apt.
    pub fn new() -> Result<Apt> {
        if host::which("apt-get").is_none() {
            bail!("this machine has no apt-get (Debian 12 or newer is what the set-up knows)");
        }
        let dir = paths::target().join("apt");
        let parts = dir.join("sources");
        // A list that the machine no longer has must not stay here.
        let _ = std::fs::remove_dir_all(&parts);
        std::fs::create_dir_all(&parts)?;
        std::fs::create_dir_all(dir.join("lists/partial"))?;
        for entry in std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten() {
            let path = entry?.path();
            let known = path.extension().is_some_and(|end| end == "list" || end == "sources");
            if let (true, Some(name)) = (known, path.file_name()) {
                std::fs::copy(&path, parts.join(name))
                    .with_context(|| format!("copying {}", path.display()))?;
            }
        }
        Ok(Apt { dir, updated: false })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = host::tool(program);
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C").arg("-q");
        let mut option = |text: String| {
            command.args(["-o", &text]);
        };
        option(format!("Dir::Etc::SourceParts={}", self.dir.join("sources").display()));
        option(format!("Dir::State::Lists={}", self.dir.join("lists").display()));
        option("Dir::Cache::pkgcache=".to_owned());
        option("Dir::Cache::srcpkgcache=".to_owned());
        option("Acquire::Languages=none".to_owned());
        if host::is_root() {
            // The unprivileged user of apt can't write to the target folder.
            option("APT::Sandbox::User=root".to_owned());
        }
        command
    }

    /// Fetches the lists, once.
    pub fn update(&mut self) -> Result<()> {
        if !self.updated {
            eprintln!("setup: fetching the package lists");
            host::run(self.command("apt-get").arg("update"))?;
            self.updated = true;
        }
        Ok(())
    }

    /// The version that would be installed.
    pub fn candidate(&self, package: &str) -> Result<Option<String>> {
        let text = host::run(self.command("apt-cache").args(["policy", package]))?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
        Ok(line.filter(|version| *version != "(none)").map(str::to_owned))
    }

    /// The names of packages that start with `prefix`.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let text = host::run(self.command("apt-cache").args(["pkgnames", prefix]))?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Adds the backports suite of this Debian from the mirror that the machine itself uses, and returns its name.
    pub fn add_backports(&mut self) -> Result<String> {
        let release =
            std::fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
        let value = |key: &str| {
            release
                .lines()
                .find_map(|line| line.strip_prefix(key))
                .map(|text| text.trim_matches('"').to_owned())
        };
        let codename =
            value("VERSION_CODENAME=").context("/etc/os-release names no VERSION_CODENAME")?;
        if value("ID=").as_deref() != Some("debian") {
            bail!(
                "this is not Debian, and its package sources have no QEMU 10; install QEMU 10 or newer by hand"
            );
        }
        let mut texts = vec![std::fs::read_to_string("/etc/apt/sources.list").unwrap_or_default()];
        for entry in std::fs::read_dir(self.dir.join("sources"))? {
            texts.push(std::fs::read_to_string(entry?.path())?);
        }
        let mirror = texts.iter().find_map(|text| mirror(text, &codename));
        let mirror = mirror
            .with_context(|| format!("no apt source of this machine has the suite {codename}"))?;
        let suite = format!("{codename}-backports");
        let signed = match &mirror.signed_by {
            Some(key) => format!("Signed-By: {key}\n"),
            None => String::new(),
        };
        let text = format!(
            "Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n{signed}",
            mirror.uri
        );
        let file = self.dir.join("sources/bedplate-backports.sources");
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        eprintln!(
            "setup: using the suite {suite} of {} through {} (the machine's apt sources stay as they are)",
            mirror.uri,
            file.display()
        );
        self.updated = false;
        Ok(suite)
    }

    /// Installs packages (as root), from `suite` where one is given.
    pub fn install(&self, packages: &[&str], suite: Option<&str>) -> Result<()> {
        let mut command = self.command("apt-get");
        command.args(["install", "--yes", "--no-install-recommends"]);
        if let Some(suite) = suite {
            command.args(["--target-release", suite]);
        }
        host::run(command.args(packages)).map(drop)
    }

    /// Downloads a package's file into the folder `into`.
    pub fn download(&self, package: &str, into: &std::path::Path) -> Result<()> {
        host::run(self.command("apt-get").current_dir(into).args(["download", package])).map(drop)
    }
}

/// Where a suite comes from.
#[derive(Debug, PartialEq, Eq)]
struct Mirror {
    uri: String,
    signed_by: Option<String>,
}

/// Finds the source of the suite `codename` in a sources file of either format.
fn mirror(text: &str, codename: &str) -> Option<Mirror> {
    mirror_of_lines(text, codename).or_else(|| mirror_of_stanzas(text, codename))
}

/// `deb [signed-by=KEY arch=...] URI SUITE COMPONENT...`
fn mirror_of_lines(text: &str, codename: &str) -> Option<Mirror> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        let signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        (suite == codename && words.any(|component| component == "main"))
            .then(|| Mirror { uri: uri.to_owned(), signed_by })
    })
}

/// Stanzas of `Key: value` lines (deb822).
fn mirror_of_stanzas(text: &str, codename: &str) -> Option<Mirror> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let value = |key: &str| {
            stanza.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
        };
        let has = |key: &str, word: &str| {
            value(key).is_some_and(|words| words.split_whitespace().any(|one| one == word))
        };
        let enabled = value("Enabled").is_none_or(|enabled| enabled != "no");
        if !(enabled && has("Types", "deb") && has("Suites", codename) && has("Components", "main"))
        {
            return None;
        }
        let uri = value("URIs")?.split_whitespace().next()?.to_owned();
        Some(Mirror {
            uri,
            signed_by: value("Signed-By").filter(|key| !key.is_empty()).map(str::to_owned),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_found_in_both_formats() {
        let stanzas = "Types: deb\n# a comment\nURIs: http://a.example/security\nSuites: bookworm-security\nComponents: main\n\n\
                       Types: deb deb-src\nURIs: http://a.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /k.gpg\n";
        let expected = Mirror {
            uri: "http://a.example/debian".to_owned(),
            signed_by: Some("/k.gpg".to_owned()),
        };
        assert_eq!(mirror(stanzas, "bookworm"), Some(expected));
        let lines = "# deb http://no.example bookworm main\ndeb [arch=amd64 signed-by=/k.gpg] http://b.example/debian bookworm main contrib\n";
        let expected = Mirror {
            uri: "http://b.example/debian".to_owned(),
            signed_by: Some("/k.gpg".to_owned()),
        };
        assert_eq!(mirror(lines, "bookworm"), Some(expected));
        assert_eq!(mirror("deb http://c.example/debian trixie main", "bookworm"), None);
    }

    #[test]
    fn a_disabled_stanza_is_no_mirror() {
        let text = "Enabled: no\nTypes: deb\nURIs: http://a.example/debian\nSuites: bookworm\nComponents: main\n";
        assert_eq!(mirror(text, "bookworm"), None);
    }
}
