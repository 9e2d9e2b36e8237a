//! The licences of all crates that are linked in: only those that can go into a program under MIT or Apache-2.0.

use anyhow::{Context, Result, bail};
use bedplate_tests::{host, paths};
use std::process::Command;

/// Licences that ask for no more than a notice.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
];

/// Checks every package of the lock file; says how many there are.
pub fn check() -> Result<usize> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let text = host::run(Command::new(cargo).current_dir(paths::workspace()).args([
        "metadata",
        "--format-version",
        "1",
        "--locked",
    ]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut refused = Vec::new();
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none stated");
        if !is_allowed(licence) {
            refused.push(format!("{} {}: {licence}", package["name"], package["version"]));
        }
    }
    if !refused.is_empty() {
        bail!("these crates have licences that are not allowed here:\n  {}", refused.join("\n  "));
    }
    Ok(packages.len())
}

/// Whether an SPDX expression can be met with allowed licences alone. The old form `MIT/Apache-2.0` means "or".
fn is_allowed(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace(" WITH ", "\u{0}WITH\u{0}");
    let words: Vec<String> =
        spaced.split_whitespace().map(|word| word.replace('\u{0}', " ")).collect();
    let mut words = words.iter().map(String::as_str).peekable();
    let result = any_of(&mut words);
    result && words.next().is_none()
}

fn any_of<'a, I: Iterator<Item = &'a str>>(words: &mut std::iter::Peekable<I>) -> bool {
    let mut result = all_of(words);
    while words.next_if_eq(&"OR").is_some() {
        // Both sides must be read, so no short cut here.
        result |= all_of(words);
    }
    result
}

fn all_of<'a, I: Iterator<Item = &'a str>>(words: &mut std::iter::Peekable<I>) -> bool {
    let mut result = one(words);
    while words.next_if_eq(&"AND").is_some() {
        result &= one(words);
    }
    result
}

fn one<'a, I: Iterator<Item = &'a str>>(words: &mut std::iter::Peekable<I>) -> bool {
    match words.next() {
        Some("(") => any_of(words) && words.next() == Some(")"),
        Some(licence) => ALLOWED.contains(&licence),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_need_one_allowed_choice_of_each_part() {
        for fine in [
            "MIT",
            "MIT OR GPL-3.0-only",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
        ] {
            assert!(is_allowed(fine), "{fine}");
        }
        for bad in [
            "",
            "GPL-2.0-only",
            "MIT AND GPL-2.0-only",
            "(MIT OR Apache-2.0) AND LGPL-2.1",
            "MIT MIT",
            "none stated",
            "(MIT",
        ] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
