"""Which experts tokens choose: counted while serving, told, and what steps are priced by."""
