//! What is printed: text for people or JSON for programs, both to the standard output.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use std::io::{self, Write};

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// Text for people.
    Human,
    /// JSON for programs.
    Json,
}

/// Options for the form of the output.
#[derive(Args, Debug)]
pub struct OutputArgs {
    /// Form of the output
    #[arg(long, value_name = "FORM", default_value = "human")]
    output: Form,
    /// Short for --output=json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl OutputArgs {
    pub fn is_json(&self) -> bool {
        self.json || self.output == Form::Json
    }
}

/// Prints text as it is.
pub fn text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a value as JSON, indented like qemu-img's.
pub fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let mut out = Vec::new();
    let format = PrettyFormatter::with_indent(b"    ");
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))?;
    out.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&out)?;
    Ok(stdout.flush()?)
}

/// Prints a value as one line of JSON.
pub fn json_line<T: Serialize>(value: &T) -> Result<(), Failure> {
    text(&format!("{}\n", serde_json::to_string(value)?))
}
