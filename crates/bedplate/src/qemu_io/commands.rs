//! The commands: their names and arguments, and running one line.

use super::report::{complain, say};
use super::session::Session;
use super::{aio, life, rw, space};

/// The command has failed and has said why.
#[derive(Debug)]
pub struct Failed;

/// How a command ended.
pub type Ran = Result<(), Failed>;

/// Prints why a command failed, on the standard output as scripts expect it.
pub fn fail<T>(text: impl AsRef<str>) -> Result<T, Failed> {
    say(text.as_ref());
    Err(Failed)
}

/// Prints why a command failed, on the standard error.
pub fn fail_aloud<T>(text: impl AsRef<str>) -> Result<T, Failed> {
    complain(text.as_ref());
    Err(Failed)
}

/// A command.
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// A short name.
    short: Option<char>,
    /// Its arguments, for people.
    arguments: &'static str,
    /// What it does, in some words.
    about: &'static str,
    /// More about it.
    more: &'static str,
    /// Arguments it needs at least.
    least: usize,
    /// Arguments it takes at most; `None`: any number.
    most: Option<usize>,
    /// It works without an open file.
    alone: bool,
    /// It changes the disk.
    changes: bool,
}

const fn command(name: &'static str, about: &'static str) -> Command {
    Command {
        name,
        short: None,
        arguments: "",
        about,
        more: "",
        least: 0,
        most: Some(0),
        alone: false,
        changes: false,
    }
}

impl Command {
    const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    const fn takes(mut self, least: usize, most: Option<usize>, arguments: &'static str) -> Self {
        (self.least, self.most, self.arguments) = (least, most, arguments);
        self
    }

    const fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    const fn changes(mut self) -> Self {
        self.changes = true;
        self
    }

    const fn more(mut self, more: &'static str) -> Self {
        self.more = more;
        self
    }

    /// The line that tells how it is used.
    pub fn usage(&self) -> String {
        let space = if self.arguments.is_empty() { "" } else { " " };
        format!("{}{space}{} -- {}", self.name, self.arguments, self.about)
    }

    fn expected(&self) -> String {
        match (self.least, self.most) {
            (least, None) => format!("at least {least} arguments"),
            (least, Some(most)) if least == most => format!("{least} arguments"),
            (least, Some(most)) => format!("between {least} and {most} arguments"),
        }
    }
}

const READ_HELP: &str = "
 -C  print the figures for programs
 -P  the byte that every byte read must be; the command fails otherwise
 -q  print no figures
 -r  accepted for scripts; memory is registered with the kernel or not as the engine sees fit
 -v  print what was read
";

const WRITE_HELP: &str = "
 -C  print the figures for programs
 -f  the write is durable when it completes
 -P  the byte to write [default: 0xcd]
 -q  print no figures
 -r  accepted for scripts; memory is registered with the kernel or not as the engine sees fit
";

/// All commands, by name.
pub const COMMANDS: &[Command] = &[
    command("abort", "ends the process as a crash does").alone(),
    command("aio_flush", "waits until all requests of aio_read and aio_write have completed"),
    command("aio_read", "reads, and goes on to the next command meanwhile")
        .takes(2, None, "[-Ciqrv] [-P pattern] off len [len..]")
        .more(" The command succeeds when the request has begun; what becomes of it is only printed.\n -i  count a request that can't be, and do nothing\n")
        ,
    command("aio_write", "writes, and goes on to the next command meanwhile")
        .takes(2, None, "[-Cfiqruz] [-P pattern] off len [len..]")
        .changes()
        .more(" The command succeeds when the request has begun; what becomes of it is only printed.\n -i  count a request that can't be, and do nothing\n -u  with -z: the space may be given back\n -z  write zeroes; one length only\n"),
    command("alloc", "tells how much of a range the image itself holds").takes(1, Some(2), "off [len]"),
    command("break", "holds the next request that comes to an event (read_aio, write_aio, flush_to_disk)")
        .takes(2, Some(2), "event tag")
        .more(" The file must have been opened as blkdebug::FILE. Writes to clusters of a held one wait for it.\n"),
    command("close", "closes the file").short('c'),
    command("discard", "gives up a range's content; whole clusters give their space back")
        .short('d')
        .takes(2, None, "[-Cq] off len")
        .changes(),
    command("flush", "makes everything written durable").short('f'),
    command("help", "lists the commands, or explains one").short('?').takes(0, Some(1), "[command]").alone(),
    command("info", "describes the image").short('i'),
    command("length", "prints the disk's size").short('l'),
    command("map", "lists which parts of the disk the image itself holds"),
    command("open", "opens a file")
        .short('o')
        .takes(1, None, "[-rsCnkU] [-i aio] [-t cache] [-d discard] [-o options] [path]")
        .alone()
        .more(" The options are those of the program itself; -o takes key=value,... as --image-opts does.\n"),
    command("quit", "ends the program").short('q').alone(),
    command("read", "reads a range")
        .short('r')
        .takes(2, None, "[-bCqrv] [-P pattern [-s off] [-l len]] off len")
        .more(" -b  read from the space for VM state, behind the disk\n -l  with -P: how many bytes are looked at\n -p  ignored, as ever\n -s  with -P: where in the range that begins\n"),
    command("readv", "reads a range into several pieces of memory").takes(2, None, "[-Cqrv] [-P pattern] off len [len..]"),
    command("remove_break", "takes back a 'break' and lets what it holds go on").takes(1, Some(1), "tag"),
    command("reopen", "opens the file anew, in another way").takes(0, None, "[(-r|-w)] [-c cache] [-o options]"),
    command("resume", "lets a held request go on").takes(1, Some(1), "tag"),
    command("sigraise", "sends this process a signal").takes(1, Some(1), "signal").alone(),
    command("sleep", "waits for a number of milliseconds").takes(1, Some(1), "ms").alone(),
    command("truncate", "sets the disk's size").short('t').takes(1, Some(3), "[-m prealloc_mode] off").changes(),
    command("wait_break", "waits until a request is held").takes(1, Some(1), "tag"),
    command("write", "writes a range")
        .short('w')
        .takes(2, None, "[-bcCfnqruz] [-P pattern | -s source_file] off len")
        .changes()
        .more(" -b  write to the space for VM state, behind the disk\n -c  write compressed clusters\n -n  with -z: fail rather than write zeroes as data\n -p  ignored, as ever\n -s  write what this file holds, again and again\n -u  with -z: the space may be given back\n -z  write zeroes\n"),
    command("writev", "writes a range from several pieces of memory")
        .takes(2, None, "[-Cfqr] [-P pattern] off len [len..]")
        .changes(),
];

fn find(name: &str) -> Option<&'static Command> {
    let mut letters = name.chars();
    let single = letters.next().filter(|_| letters.next().is_none());
    COMMANDS.iter().find(|c| c.name == name || (single.is_some() && c.short == single))
}

/// Runs one line; an empty one does nothing.
pub async fn run(session: &mut Session, line: &str) -> Ran {
    let mut words = line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned);
    let Some(name) = words.next() else { return Ok(()) };
    let Some(command) = find(&name) else {
        return fail_aloud(format!("command \"{name}\" not found"));
    };
    let words: Vec<String> = words.collect();
    if !command.alone && session.device.is_none() {
        return fail_aloud("no file open, try 'help open'");
    }
    if words.len() < command.least || command.most.is_some_and(|most| words.len() > most) {
        let (count, expected) = (words.len(), command.expected());
        return fail_aloud(format!("bad argument count {count} to {name}, expected {expected}"));
    }
    if command.changes && session.device.as_ref().is_some_and(|d| d.disk.read_only()) {
        return fail_aloud("qemu-io: Block node is read-only");
    }
    let call = Call { command, words: &words };
    match command.name {
        "abort" => life::abort(),
        "aio_flush" => aio::flush(session).await,
        "aio_read" => aio::read(session, &call).await,
        "aio_write" => aio::write(session, &call).await,
        "alloc" => space::alloc(session, &call).await,
        "break" => life::set_break(session, &call),
        "close" => session.close().await,
        "discard" => rw::discard(session, &call).await,
        "flush" => rw::flush(session).await,
        "info" => space::info(session).await,
        "length" => space::length(session),
        "map" => space::map(session).await,
        "open" => life::open(session, &call).await,
        "quit" => {
            session.quit = true;
            Ok(())
        }
        "read" => rw::read(session, &call).await,
        "readv" => rw::readv(session, &call).await,
        "remove_break" => life::remove_break(session, &call),
        "reopen" => life::reopen(session, &call).await,
        "resume" => life::resume(session, &call),
        "sigraise" => life::sigraise(&call),
        "sleep" => life::sleep(&call).await,
        "truncate" => space::truncate(session, &call).await,
        "wait_break" => life::wait_break(session, &call).await,
        "write" => rw::write(session, &call).await,
        "writev" => rw::writev(session, &call).await,
        _ => help(&words),
    }
}

/// A command with the words behind its name.
pub struct Call<'a> {
    /// The command.
    pub command: &'static Command,
    /// The words.
    pub words: &'a [String],
}

impl Call<'_> {
    /// The first word; empty when there is none.
    pub fn word(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    /// Fails with the command's usage.
    pub fn usage<T>(&self) -> Result<T, Failed> {
        fail(self.command.usage())
    }

    /// Fails over an option that can't be read.
    pub fn bad_option<T>(&self, words: &str) -> Result<T, Failed> {
        complain(&format!("{}: {words}", self.command.name));
        self.usage()
    }
}

fn help(words: &[String]) -> Ran {
    let Some(name) = words.first() else {
        for command in COMMANDS {
            say(&command.usage());
        }
        say("\nUse 'help commandname' for extended help.");
        return Ok(());
    };
    let Some(command) = find(name) else {
        say(&format!("command {name} not found"));
        return Ok(());
    };
    let common = match command.name {
        "read" | "readv" | "aio_read" => READ_HELP,
        "write" | "writev" | "aio_write" => WRITE_HELP,
        _ => "",
    };
    let text = format!("{}\n{}{}", command.usage(), command.more, common.trim_start_matches('\n'));
    say(text.trim_end());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_short_names_unique() {
        assert!(COMMANDS.is_sorted_by_key(|c| c.name));
        let mut letters: Vec<char> = COMMANDS.iter().filter_map(|c| c.short).collect();
        letters.sort_unstable();
        assert!(letters.windows(2).all(|w| w[0] != w[1]));
        assert_eq!(find("q").map(|c| c.name), Some("quit"));
        assert!(find("").is_none() && find("re").is_none());
    }
}
