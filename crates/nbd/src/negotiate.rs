//! The first phase of a session, fixed newstyle: the client asks with options and chooses an export.
//!
//! Caller: the server, once for each connection, under a time limit. Works on any [`ByteStream`].
//! Invariants: data of an option is read only when its length is within [`MAX_NBD_OPTION`], else it is skipped;
//! no reply string is longer than [`MAX_NBD_STRING`]; nothing of the disk is touched before an export is chosen.

use crate::bitmap::{self, MAX_BITMAPS};
use crate::proto::{
    self, OptionHeader, OptionReply, Reader, export_flag, handshake, option, reply,
};
use crate::stream::{ByteStream, Input};
use bedplate_types::limits::{MAX_NBD_OPTION, MAX_NBD_STRING};
use std::io::{self, IoSlice};

/// What negotiation tells clients about an export.
#[derive(Clone, Debug)]
pub struct ExportInfo {
    /// The name clients ask for.
    pub name: String,
    /// A text for people; empty: none.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Bits of [`export_flag`]; `SEND_DF` is added for sessions with structured replies.
    pub flags: u16,
    /// Minimum, preferred and maximum block size.
    pub block: BlockSizes,
    /// Names of the dirty bitmaps that clients may ask for.
    pub bitmaps: Vec<String>,
}

/// Sizes of requests an export asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths should be multiples of this.
    pub minimum: u32,
    /// Requests of at least this size and alignment are served best.
    pub preferred: u32,
    /// Largest payload.
    pub maximum: u32,
}

/// What was agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Index of the chosen export.
    pub export: usize,
    /// Structured replies are used.
    pub structured: bool,
    /// `base:allocation` was chosen for this export.
    pub allocation: bool,
    /// Which of the export's bitmaps were chosen: bit `n` for the `n`-th.
    pub bitmaps: u32,
}

/// How a negotiation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The transmission phase begins.
    Ready(Agreed),
    /// The connection is to be closed, for this reason.
    Close(&'static str),
}

/// The number that stands for `base:allocation` in replies.
pub const ALLOCATION_ID: u32 = 1;
/// The number that stands for the first bitmap; the others follow.
pub const FIRST_BITMAP_ID: u32 = 2;

/// Queries in one LIST_META_CONTEXT or SET_META_CONTEXT.
const MAX_QUERIES: u32 = 256;

/// Negotiates with the client behind `input`.
///
/// # Errors
/// Those of the stream.
pub async fn negotiate<S: ByteStream>(
    input: &mut Input<'_, S>,
    exports: &[ExportInfo],
) -> io::Result<Outcome> {
    let mut hello = Vec::with_capacity(18);
    hello.extend_from_slice(&proto::MAGIC.to_be_bytes());
    hello.extend_from_slice(&proto::OPTION_MAGIC.to_be_bytes());
    let ours = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    hello.extend_from_slice(&ours.to_be_bytes());
    send(input, &hello).await?;

    let mut raw = [0; 4];
    if !input.read_exact_or_end(&mut raw).await? {
        return Ok(Outcome::Close("the client left before it said anything"));
    }
    let flags = u32::from_be_bytes(raw);
    if flags & !u32::from(ours) != 0 {
        return Ok(Outcome::Close("the client sent unknown handshake flags"));
    }
    let mut state = State {
        exports,
        fixed: flags & u32::from(handshake::FIXED_NEWSTYLE) != 0,
        no_zeroes: flags & u32::from(handshake::NO_ZEROES) != 0,
        structured: false,
        chosen: None,
        out: Vec::new(),
    };
    loop {
        let mut raw = [0; proto::OPTION_HEADER];
        if !input.read_exact_or_end(&mut raw).await? {
            return Ok(Outcome::Close("the client left"));
        }
        let Some(header) = OptionHeader::parse(&raw) else {
            return Ok(Outcome::Close("an option did not start with IHAVEOPT"));
        };
        let outcome = if header.len > MAX_NBD_OPTION {
            // No error can be sent for EXPORT_NAME, and an old client can't read one.
            if header.option == option::EXPORT_NAME || !state.fixed {
                return Ok(Outcome::Close("an option was longer than the limit"));
            }
            input.skip(u64::from(header.len)).await?;
            state.error(header.option, reply::ERR_TOO_BIG, "the option's data is too long");
            None
        } else {
            // The bound makes this at most 64 KiB.
            let mut data = vec![0; header.len as usize];
            input.read_exact(&mut data).await?;
            state.option(header.option, &data)
        };
        if !state.out.is_empty() {
            send(input, &state.out).await?;
            state.out.clear();
        }
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
    }
}

async fn send<S: ByteStream>(input: &Input<'_, S>, bytes: &[u8]) -> io::Result<()> {
    input.stream().write_all(&mut [IoSlice::new(bytes)]).await
}

/// What has been agreed so far, and the replies not sent yet.
struct State<'e> {
    exports: &'e [ExportInfo],
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which contexts were chosen last, whether `base:allocation` was, and which bitmaps.
    chosen: Option<(usize, bool, u32)>,
    out: Vec<u8>,
}

impl State<'_> {
    /// Answers one option; an outcome ends the negotiation once the replies are sent.
    fn option(&mut self, opt: u32, data: &[u8]) -> Option<Outcome> {
        if !self.fixed && opt != option::EXPORT_NAME {
            return Some(Outcome::Close("an old client sent an option that needs fixed newstyle"));
        }
        match opt {
            option::EXPORT_NAME => return Some(self.export_name(data)),
            option::ABORT => {
                self.reply(opt, reply::ACK, &[]);
                return Some(Outcome::Close("the client gave up"));
            }
            option::LIST => self.list(data),
            option::STARTTLS if data.is_empty() => {
                self.error(opt, reply::ERR_POLICY, "this server does not offer TLS");
            }
            option::STARTTLS => self.error(opt, reply::ERR_INVALID, "STARTTLS carries no data"),
            option::INFO | option::GO => return self.info(opt, data),
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                self.reply(opt, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY => {
                self.error(opt, reply::ERR_INVALID, "STRUCTURED_REPLY carries no data");
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta(opt, data),
            _ => self.error(opt, reply::ERR_UNSUP, "this server does not know the option"),
        }
        None
    }

    fn export_name(&mut self, name: &[u8]) -> Outcome {
        if check_name(name).is_err() {
            return Outcome::Close("the client asked for an export with an impossible name");
        }
        let Some(export) = self.find(name) else {
            return Outcome::Close("the client asked for an export that does not exist");
        };
        let (size, flags) = (self.exports[export].size, self.flags(export));
        self.out.extend_from_slice(&size.to_be_bytes());
        self.out.extend_from_slice(&flags.to_be_bytes());
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        self.ready(export)
    }

    fn list(&mut self, data: &[u8]) {
        if !data.is_empty() {
            return self.error(option::LIST, reply::ERR_INVALID, "LIST carries no data");
        }
        for e in self.exports {
            let name = cut(&e.name, MAX_NBD_STRING as usize).as_bytes();
            let text = cut(&e.description, MAX_NBD_STRING as usize).as_bytes();
            let mut body = Vec::with_capacity(4 + name.len() + text.len());
            body.extend_from_slice(&(name.len() as u32).to_be_bytes());
            body.extend_from_slice(name);
            body.extend_from_slice(text);
            self.reply(option::LIST, reply::SERVER, &body);
        }
        self.reply(option::LIST, reply::ACK, &[]);
    }

    fn info(&mut self, opt: u32, data: &[u8]) -> Option<Outcome> {
        let Some((name, wanted)) = parse_info(data) else {
            self.error(opt, reply::ERR_INVALID, "the option's lengths do not fit its data");
            return None;
        };
        let export = self.named(opt, name)?;
        let e = &self.exports[export];
        let mut body = Vec::with_capacity(16);
        body.extend_from_slice(&proto::info::EXPORT.to_be_bytes());
        body.extend_from_slice(&e.size.to_be_bytes());
        body.extend_from_slice(&self.flags(export).to_be_bytes());
        self.reply(opt, reply::INFO, &body);

        let asked = |what: u16| wanted.chunks_exact(2).any(|w| w == what.to_be_bytes());
        let mut texts = Vec::new();
        if asked(proto::info::NAME) {
            texts.push((proto::info::NAME, cut(&e.name, MAX_NBD_STRING as usize)));
        }
        if asked(proto::info::DESCRIPTION) && !e.description.is_empty() {
            texts.push((proto::info::DESCRIPTION, cut(&e.description, MAX_NBD_STRING as usize)));
        }
        for (what, text) in texts {
            let body = [&what.to_be_bytes(), text.as_bytes()].concat();
            self.reply(opt, reply::INFO, &body);
        }
        // Sent whether asked for or not: a client that knows it may use it.
        let mut body = Vec::with_capacity(14);
        body.extend_from_slice(&proto::info::BLOCK_SIZE.to_be_bytes());
        for size in [e.block.minimum, e.block.preferred, e.block.maximum] {
            body.extend_from_slice(&size.to_be_bytes());
        }
        self.reply(opt, reply::INFO, &body);
        self.reply(opt, reply::ACK, &[]);
        (opt == option::GO).then(|| self.ready(export))
    }

    fn meta(&mut self, opt: u32, data: &[u8]) {
        let set = opt == option::SET_META_CONTEXT;
        if set {
            // What was chosen before is replaced even when this one fails.
            self.chosen = None;
        }
        if !self.structured {
            let text = "metadata contexts need structured replies first";
            return self.error(opt, reply::ERR_INVALID, text);
        }
        let Some((name, queries)) = parse_meta(data) else {
            return self.error(opt, reply::ERR_INVALID, "the option's lengths do not fit its data");
        };
        let Some(export) = self.named(opt, name) else { return };
        let names = self.exports.get(export).map(|e| e.bitmaps.as_slice()).unwrap_or_default();
        let bitmaps = names.iter().take(MAX_BITMAPS).map(|name| bitmap::context(name));
        let offered: Vec<Vec<u8>> =
            std::iter::once(proto::BASE_ALLOCATION.to_vec()).chain(bitmaps).collect();
        // When asking what there is, a query may be the begin of names.
        let begins = [&b"base:"[..], b"qemu:", b"qemu:dirty-bitmap:"];
        let wanted = |context: &[u8]| {
            let named =
                |q: &&[u8]| *q == context || (!set && begins.contains(q) && context.starts_with(q));
            queries.iter().any(named) || (!set && queries.is_empty())
        };
        let (mut allocation, mut chosen) = (false, 0);
        for (id, context) in (ALLOCATION_ID..).zip(&offered) {
            if !wanted(context) {
                continue;
            }
            let shown = if set { id } else { 0 };
            let body = [&shown.to_be_bytes()[..], context].concat();
            self.reply(opt, reply::META_CONTEXT, &body);
            match id.checked_sub(FIRST_BITMAP_ID) {
                None => allocation = true,
                Some(n) => chosen |= 1u32.checked_shl(n).unwrap_or(0),
            }
        }
        if set {
            self.chosen = Some((export, allocation, chosen));
        }
        self.reply(opt, reply::ACK, &[]);
    }

    /// The export `name` says, or a reply that there is none.
    fn named(&mut self, opt: u32, name: &[u8]) -> Option<usize> {
        if let Err(why) = check_name(name) {
            self.error(opt, reply::ERR_INVALID, why);
            return None;
        }
        let found = self.find(name);
        if found.is_none() {
            // The echo is short whatever was asked for.
            let lossy = String::from_utf8_lossy(name);
            let echo: String = lossy.chars().take(60).flat_map(char::escape_default).collect();
            let more = if lossy.chars().nth(60).is_some() { "..." } else { "" };
            let text = format!("there is no export '{echo}{more}'");
            self.error(opt, reply::ERR_UNKNOWN, &text);
        }
        found
    }

    /// The empty name stands for the first export.
    fn find(&self, name: &[u8]) -> Option<usize> {
        let named = self.exports.iter().position(|e| e.name.as_bytes() == name);
        named.or_else(|| (name.is_empty() && !self.exports.is_empty()).then_some(0))
    }

    fn flags(&self, export: usize) -> u16 {
        let df = if self.structured { export_flag::SEND_DF } else { 0 };
        self.exports[export].flags | export_flag::HAS_FLAGS | df
    }

    fn ready(&self, export: usize) -> Outcome {
        let chosen = self.chosen.filter(|(of, ..)| *of == export);
        let (allocation, bitmaps) = chosen.map_or((false, 0), |(_, a, b)| (a, b));
        Outcome::Ready(Agreed { export, structured: self.structured, allocation, bitmaps })
    }

    fn reply(&mut self, option: u32, kind: u32, body: &[u8]) {
        // Bodies are made above from bounded strings, so the length fits.
        let header = OptionReply { option, kind, len: body.len() as u32 };
        self.out.extend_from_slice(&header.encode());
        self.out.extend_from_slice(body);
    }

    fn error(&mut self, option: u32, kind: u32, text: &str) {
        self.reply(option, kind, cut(text, MAX_NBD_STRING as usize).as_bytes());
    }
}

/// At most `max` bytes of `text`, not splitting a character.
fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    if name.len() > MAX_NBD_STRING as usize {
        return Err("an export name has at most 4096 bytes");
    }
    if name.contains(&0) {
        return Err("an export name holds no NUL");
    }
    Ok(())
}

/// Name and wanted pieces of information, two bytes each, of INFO or GO.
fn parse_info(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut r = Reader::new(data);
    let name = r.string()?;
    let count = usize::from(r.u16()?);
    (r.rest().len() == count * 2).then_some((name, r.rest()))
}

/// Export name and queries of LIST_META_CONTEXT or SET_META_CONTEXT.
fn parse_meta(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut r = Reader::new(data);
    let name = r.string()?;
    let count = r.u32()?;
    if count > MAX_QUERIES {
        return None;
    }
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(r.string().filter(|q| q.len() <= MAX_NBD_STRING as usize)?);
    }
    r.is_empty().then_some((name, queries))
}

#[cfg(test)]
mod tests;
