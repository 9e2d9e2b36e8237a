//! Plain tables for the terminal.

/// Prints rows under their headings, each column as wide as its widest cell.
pub fn table(heads: &[&str], rows: &[Vec<String>]) {
    print!("{}", render(heads, rows));
}

/// The table as text. Cells that start with a digit are set to the right.
pub fn render(heads: &[&str], rows: &[Vec<String>]) -> String {
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count());
        cells.chain(heads.get(at).map(|head| head.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let numeric = |at: usize| {
        rows.iter()
            .filter_map(|row| row.get(at))
            .all(|cell| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-'))
    };
    let numeric: Vec<bool> = (0..heads.len()).map(numeric).collect();
    let line = |cells: Vec<&str>| {
        let set = cells.iter().zip(&widths).zip(&numeric).map(|((cell, &width), &right)| {
            if right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        set.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(heads.to_vec());
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    text.push_str(&line(rule.iter().map(String::as_str).collect()));
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_set_to_the_right_and_words_to_the_left() {
        let rows =
            [vec!["a".to_owned(), "1".to_owned()], vec!["long".to_owned(), "1000".to_owned()]];
        assert_eq!(render(&["x", "n"], &rows), "x        n\n----  ----\na        1\nlong  1000\n");
    }
}
