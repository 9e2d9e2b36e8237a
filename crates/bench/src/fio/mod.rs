//! fio's job files: the options that this engine has, and a sentence for those that it lacks.
//!
//! Callers: the command (`bedplate bench run --fio`). Written from fio's documentation.
//!
//! Where fio's defaults differ from this engine's they are fio's: buffered `psync` at depth 1, one request a system call, jobs that all use
//! the whole region. What differs in meaning: `rate_iops` is an open loop here (latency counts from the schedule), and content is
//! checked by this engine's own stamps, whatever `verify` names.

mod section;
#[cfg(test)]
mod tests;

use crate::job::Job;
use crate::target::Target;
use bedplate_types::{Error, ErrorKind, Result};
use section::Section;

/// What a job file asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FioJobs {
    /// Groups that run one after the other; the jobs of a group run at once.
    pub groups: Vec<Vec<(Target, Job)>>,
    /// Sentences about options that were left out.
    pub ignored: Vec<String>,
}

/// Reads a job file. `target` is loaded instead of what the file names, when it is set. Options that are lacking are an error,
/// or left out with a sentence when `ignore_unknown` is set.
///
/// # Errors
/// `Unsupported` with all that is lacking; `InvalidInput` for what can't be read.
pub fn read_fio(text: &str, target: Option<&Target>, ignore_unknown: bool) -> Result<FioJobs> {
    let mut jobs = FioJobs::default();
    let mut lacking = Vec::new();
    for (section, mut words) in sections(text)? {
        let mut parsed = Section::new(&section);
        // What selects other meanings must be known before.
        words.sort_by_key(|word| !matches!(word.key.as_str(), "ioengine" | "rw" | "readwrite"));
        for word in &words {
            let refused = |text: String| format!("line {}: {text}", word.line);
            match parsed.set(&word.key, word.value.as_deref()) {
                Ok(None) => {}
                Ok(Some(lack)) => lacking.push(refused(lack)),
                Err(e) => return Err(Error::new(e.kind(), refused(e.message().to_owned()))),
            }
        }
        let (job, new_group) = parsed.finish(target, &mut lacking)?;
        if new_group || jobs.groups.is_empty() {
            jobs.groups.push(Vec::new());
        }
        if let Some(group) = jobs.groups.last_mut() {
            group.push(job);
        }
    }
    if jobs.groups.is_empty() {
        return Err(bad("the job file has no job".to_owned()));
    }
    lacking.dedup();
    if !lacking.is_empty() && !ignore_unknown {
        let text = format!(
            "this job file needs what 'bedplate bench' lacks (--ignore-unknown leaves it out): {}",
            lacking.join("; ")
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    jobs.ignored = lacking;
    Ok(jobs)
}

fn bad(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// One option as it stands in the file.
#[derive(Clone, Debug)]
struct Word {
    line: usize,
    key: String,
    value: Option<String>,
}

/// The sections with their options, those of `[global]` before it included.
fn sections(text: &str) -> Result<Vec<(String, Vec<Word>)>> {
    let (mut global, mut all): (Vec<Word>, Vec<(String, Vec<Word>)>) = (Vec::new(), Vec::new());
    let mut in_global = true;
    for (line, content) in (1..).zip(text.lines()) {
        // A comment begins a line or stands after a blank; else the sign belongs to a value.
        let mut before = ' ';
        let comment = content.find(|c: char| {
            let begins = matches!(c, ';' | '#') && before.is_whitespace();
            before = c;
            begins
        });
        let content = content.get(..comment.unwrap_or(content.len())).unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        if let Some(name) = content.strip_prefix('[') {
            let name = name
                .strip_suffix(']')
                .ok_or_else(|| bad(format!("line {line}: '{content}' is no section")))?;
            in_global = name == "global";
            if !in_global {
                all.push((name.to_owned(), global.clone()));
            }
            continue;
        }
        let (key, value) = match content.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim().to_owned())),
            None => (content, None),
        };
        let word = Word { line, key: key.to_owned(), value };
        match all.last_mut() {
            Some((_, words)) if !in_global => words.push(word),
            _ => global.push(word),
        }
    }
    Ok(all)
}
