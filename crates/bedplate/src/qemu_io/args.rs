//! Options of a command line, taken one after another as GNU getopt does: words that are no options may stand anywhere,
//! `--` ends the options, short ones may be joined, long ones shortened.
//!
//! Callers: the program's own command line and those of its commands.

/// An option that may be given.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// What the option is called when it is found; for short options the letter itself.
    pub key: char,
    /// Its long name.
    pub long: Option<&'static str>,
    /// It takes a value.
    pub value: bool,
}

/// Short options as getopt spells them: letters, with a colon behind those that take a value.
pub fn letters(text: &str) -> Vec<Spec> {
    let mut all: Vec<Spec> = Vec::new();
    for c in text.chars() {
        match (c, all.last_mut()) {
            (':', Some(last)) => last.value = true,
            _ => all.push(Spec { key: c, long: None, value: false }),
        }
    }
    all
}

/// An option that was found, with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// [`Spec::key`].
    pub key: char,
    /// Empty where the option takes none.
    pub value: String,
}

/// Goes through a command line.
pub struct Options<'s, 'a> {
    specs: &'s [Spec],
    words: std::slice::Iter<'a, String>,
    /// Letters of joined short options that are still to be looked at.
    joined: std::str::Chars<'a>,
    rest: Vec<&'a str>,
}

impl<'s, 'a> Options<'s, 'a> {
    /// Over the words behind the program's or command's name.
    pub fn new(specs: &'s [Spec], words: &'a [String]) -> Self {
        Self { specs, words: words.iter(), joined: "".chars(), rest: Vec::new() }
    }

    /// The words that are no options; complete once all options were taken.
    pub fn rest(self) -> Vec<&'a str> {
        self.rest
    }

    fn short(&mut self, letter: char) -> Result<Found, String> {
        let Some(spec) = self.specs.iter().find(|s| s.key == letter && letter.is_ascii_graphic())
        else {
            return Err(format!("invalid option -- '{letter}'"));
        };
        if !spec.value {
            return Ok(Found { key: letter, value: String::new() });
        }
        let attached = std::mem::replace(&mut self.joined, "".chars()).as_str();
        let value = if attached.is_empty() {
            self.words.next().map(String::as_str)
        } else {
            Some(attached)
        };
        match value {
            Some(value) => Ok(Found { key: letter, value: value.to_owned() }),
            None => Err(format!("option requires an argument -- '{letter}'")),
        }
    }

    fn long(&mut self, word: &str) -> Result<Found, String> {
        let (name, attached) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let named = |s: &&Spec| s.long.is_some_and(|l| l.starts_with(name));
        let candidates: Vec<&Spec> = self.specs.iter().filter(named).collect();
        let exact = candidates.iter().find(|s| s.long == Some(name)).copied();
        let spec = match (exact, candidates.as_slice()) {
            (Some(spec), _) => spec,
            (None, [spec]) => *spec,
            (None, []) => return Err(format!("unrecognized option '--{name}'")),
            _ => return Err(format!("option '--{name}' is ambiguous")),
        };
        let full = spec.long.unwrap_or(name);
        match (spec.value, attached) {
            (false, None) => Ok(Found { key: spec.key, value: String::new() }),
            (false, Some(_)) => Err(format!("option '--{full}' doesn't allow an argument")),
            (true, Some(value)) => Ok(Found { key: spec.key, value: value.to_owned() }),
            (true, None) => match self.words.next() {
                Some(value) => Ok(Found { key: spec.key, value: value.clone() }),
                None => Err(format!("option '--{full}' requires an argument")),
            },
        }
    }
}

impl Iterator for Options<'_, '_> {
    type Item = Result<Found, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(letter) = self.joined.next() {
            return Some(self.short(letter));
        }
        let has_long = self.specs.iter().any(|s| s.long.is_some());
        loop {
            let word = self.words.next()?;
            if word == "--" {
                self.rest.extend(self.words.by_ref().map(String::as_str));
                return None;
            }
            if has_long && let Some(long) = word.strip_prefix("--") {
                return Some(self.long(long));
            }
            match word.strip_prefix('-') {
                Some(letters) if !letters.is_empty() => {
                    self.joined = letters.chars();
                    let letter = self.joined.next()?;
                    return Some(self.short(letter));
                }
                _ => self.rest.push(word),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn all(specs: &[Spec], line: &str) -> (String, Vec<String>) {
        let words = words(line);
        let mut options = Options::new(specs, &words);
        let mut found = String::new();
        for option in options.by_ref() {
            match option {
                Ok(f) => found += &format!("{}={};", f.key, f.value),
                Err(e) => found += &format!("({e})"),
            }
        }
        (found, options.rest().into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn options_may_be_joined_and_stand_behind_the_words() {
        let specs = letters("qP:v");
        assert_eq!(all(&specs, "-qvP7 0 512"), ("q=;v=;P=7;".into(), words("0 512")));
        assert_eq!(all(&specs, "0 -P 7 512 -q"), ("P=7;q=;".into(), words("0 512")));
        assert_eq!(all(&specs, "-P -1 - -- -q"), ("P=-1;".into(), words("- -q")));
        assert_eq!(all(&specs, "-x"), ("(invalid option -- 'x')".into(), vec![]));
        assert_eq!(all(&specs, "-P"), ("(option requires an argument -- 'P')".into(), vec![]));
        assert_eq!(all(&specs, "--q").0, "(invalid option -- '-')q=;");
    }

    #[test]
    fn long_options_may_be_shortened_while_one_fits() {
        let specs = [
            Spec { key: 'c', long: Some("cmd"), value: true },
            Spec { key: 't', long: Some("cache"), value: true },
            Spec { key: 'r', long: Some("read-only"), value: false },
        ];
        assert_eq!(all(&specs, "--cm=a --read -t b"), ("c=a;r=;t=b;".into(), vec![]));
        assert_eq!(all(&specs, "--c a").0, "(option '--c' is ambiguous)");
        assert_eq!(
            all(&specs, "--read-only=1").0,
            "(option '--read-only' doesn't allow an argument)"
        );
        assert_eq!(all(&specs, "--foo").0, "(unrecognized option '--foo')");
        assert_eq!(all(&specs, "--cmd").0, "(option '--cmd' requires an argument)");
    }
}
