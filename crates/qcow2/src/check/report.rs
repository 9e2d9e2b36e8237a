//! What a check found and a repair mended, in numbers and sentences.
//!
//! Callers: the checker and the repair fill it, `image` prints it. The serialised keys are those of `qemu-img check
//! --output=json`; counts of zero are left out where qemu-img leaves them out.

use serde::Serialize;

/// What sort of trouble a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Data is damaged, or writing would damage it.
    Corruption,
    /// Space that nothing uses is counted as used.
    Leak,
    /// Something could not be checked.
    Error,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What sort of trouble it is.
    pub severity: Severity,
    /// The sentence.
    pub text: String,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckReport {
    /// The image's name.
    pub filename: String,
    /// The image's format: "qcow2".
    pub format: &'static str,
    /// Things that could not be checked.
    pub check_errors: u64,
    /// The end of the last cluster in use.
    #[serde(skip_serializing_if = "is_zero")]
    pub image_end_offset: u64,
    /// Corruptions.
    #[serde(skip_serializing_if = "is_zero")]
    pub corruptions: u64,
    /// Leaked clusters.
    #[serde(skip_serializing_if = "is_zero")]
    pub leaks: u64,
    /// Corruptions that a repair has put right; they are not among the others.
    #[serde(skip_serializing_if = "is_zero")]
    pub corruptions_fixed: u64,
    /// Leaked clusters that a repair has given back; they are not among the others.
    #[serde(skip_serializing_if = "is_zero")]
    pub leaks_fixed: u64,
    /// Clusters of the disk that the guest sees.
    #[serde(skip_serializing_if = "is_zero")]
    pub total_clusters: u64,
    /// Guest clusters that have space.
    #[serde(skip_serializing_if = "is_zero")]
    pub allocated_clusters: u64,
    /// Guest clusters that do not follow their neighbour in the file.
    #[serde(skip_serializing_if = "is_zero")]
    pub fragmented_clusters: u64,
    /// Guest clusters that are compressed.
    #[serde(skip_serializing_if = "is_zero")]
    pub compressed_clusters: u64,
    /// The findings in the order they were made, up to the caller's limit.
    #[serde(skip)]
    pub findings: Vec<Finding>,
    /// Findings beyond the limit, which are counted but not kept.
    #[serde(skip)]
    pub findings_left_out: u64,
    #[serde(skip)]
    pub(super) max_findings: usize,
    #[serde(skip)]
    pub(super) damage: Damage,
}

/// What sort of repair would help.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Damage {
    /// Entries of L1 and L2 tables that can't stay as they are.
    pub(super) entries: u64,
    /// The table or the blocks of refcounts can't stay where they are.
    pub(super) refcounts: bool,
    /// The bitmaps can't be used.
    pub(super) bitmaps: bool,
    /// Things that hold references but can't be read: what they refer to is not known.
    pub(super) unknown: u64,
}

// The signature is what serde asks for.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl CheckReport {
    /// True when nothing is wrong, not even a leak.
    pub fn is_clean(&self) -> bool {
        self.check_errors == 0 && self.corruptions == 0 && self.leaks == 0
    }

    /// The exit code of `qemu-img check`: 1 the check failed, 2 corruptions, 3 only leaks, 0 clean.
    pub fn exit_code(&self) -> u8 {
        match self {
            r if r.check_errors > 0 => 1,
            r if r.corruptions > 0 => 2,
            r if r.leaks > 0 => 3,
            _ => 0,
        }
    }

    /// Notes corruptions.
    pub(super) fn corrupt(&mut self, times: u64, text: impl FnOnce() -> String) {
        self.add(Severity::Corruption, times, text);
    }

    /// Notes things that could not be checked.
    pub(super) fn error(&mut self, times: u64, text: impl FnOnce() -> String) {
        self.add(Severity::Error, times, text);
    }

    /// Notes corruptions in an entry of an L1 or L2 table.
    pub(super) fn bad_entry(&mut self, times: u64, text: impl FnOnce() -> String) {
        self.damage.entries = self.damage.entries.saturating_add(1);
        self.corrupt(times, text);
    }

    /// Adds what another part of the check has found.
    pub(super) fn merge(&mut self, part: Self) {
        self.check_errors = self.check_errors.saturating_add(part.check_errors);
        self.corruptions = self.corruptions.saturating_add(part.corruptions);
        self.leaks = self.leaks.saturating_add(part.leaks);
        self.allocated_clusters = self.allocated_clusters.saturating_add(part.allocated_clusters);
        self.fragmented_clusters =
            self.fragmented_clusters.saturating_add(part.fragmented_clusters);
        self.compressed_clusters =
            self.compressed_clusters.saturating_add(part.compressed_clusters);
        let room = self.max_findings.saturating_sub(self.findings.len());
        let cut = part.findings.len().saturating_sub(room) as u64;
        self.findings.extend(part.findings.into_iter().take(room));
        self.findings_left_out =
            self.findings_left_out.saturating_add(part.findings_left_out).saturating_add(cut);
        self.damage.entries = self.damage.entries.saturating_add(part.damage.entries);
        self.damage.unknown = self.damage.unknown.saturating_add(part.damage.unknown);
        self.damage.refcounts |= part.damage.refcounts;
        self.damage.bitmaps |= part.damage.bitmaps;
    }

    /// Counts `times` findings that one sentence describes; it is only built when it will be kept.
    pub(super) fn add(&mut self, severity: Severity, times: u64, text: impl FnOnce() -> String) {
        if times == 0 {
            return;
        }
        let count = match severity {
            Severity::Corruption => &mut self.corruptions,
            Severity::Leak => &mut self.leaks,
            Severity::Error => &mut self.check_errors,
        };
        *count = count.saturating_add(times);
        if self.findings.len() < self.max_findings {
            self.findings.push(Finding { severity, text: text() });
            self.findings_left_out = self.findings_left_out.saturating_add(times - 1);
        } else {
            self.findings_left_out = self.findings_left_out.saturating_add(times);
        }
    }
}
