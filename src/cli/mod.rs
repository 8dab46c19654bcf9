//! The commands, in words for people.
