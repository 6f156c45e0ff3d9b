"""What is asked, of which model, on which machines: plain values. Floor 1; imports no other room and never torch."""
